"""Hooks on gradients: functions of the user's that a trace would lose, and with them what they do to gradients."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.trace.frames import innermost, spot

REMEDY = (
    "Remove it (handle.remove()). To multiply a gradient by s, a number or a mask, have the forward compute "
    "x * s + (x * (1 - s)).detach() from x; to limit gradients or to update weights, pass clip_grad_norm=, "
    "clip_grad_value= or optimizer=."
)
REGISTERING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of a model's parameters and buffers.

    Copies of weights train, so that what torch, DDP, FSDP or an earlier run registered there (none of them leaves
    anything on the user's tensors) is never meant. A frozen tensor has no gradient, so a hook of it never runs.

    Raises:
        TraceError: names the first tensor and how the hook came there.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        by = [method for method, hooks in gradient_hooks(tensor).items() if hooks] if tensor.requires_grad else []
        if by:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise TraceError(
                f"Cannot trace {type(model).__name__}: its {kind} {name} has a hook on its gradient ({by[0]}), which "
                f"would never run: devices train copies of the weights. {REMEDY}"
            )


def gradient_hooks(tensor: torch.Tensor) -> Mapping[str, Mapping[int, Callable[..., Any]] | None]:
    """The hooks on a tensor's gradient by the method that registers them.

    torch has no public question for them; both attributes are what its own ``register_…`` fill and ``handle.remove()``
    empties. Tried with torch 2.11 and 2.15.
    """
    return {"register_hook": tensor._backward_hooks, REGISTERING[1].__name__: tensor._post_accumulate_grad_hooks}


class SeenHooks(TorchFunctionMode):
    """Within ``with``, ``places`` gets where hooks on gradients are registered: by a forward, on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REGISTERING:
            frame = innermost(traceback.extract_stack())
            self.places.append(f"{func.__name__}{spot(frame)}")
        return func(*args, **(kwargs or {}))
