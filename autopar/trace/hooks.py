"""Hooks on gradients, ``no_grad`` in autocast regions and writes to ``tensor.data``, which torch.export leaves out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.trace.frames import frame_text, innermost, is_internal

REMEDY = (
    "Remove it (handle.remove()). To multiply a gradient by s, a number or a mask, have the forward compute "
    "x * s + (x * (1 - s)).detach() from x; to limit gradients or to update weights, pass clip_grad_norm=, "
    "clip_grad_value= or optimizer=."
)
DATA = (torch.Tensor.data.__get__, torch.Tensor.data.__set__)  # type: ignore[attr-defined]
REGISTER_HOOK = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of a model's parameters and buffers.

    Ranks train copies of the weights, on which such hooks would never run. torch, DDP, FSDP and earlier runs leave no
    hooks on the user's tensors, so a hook is the user's. A frozen tensor has no gradient, so its hooks are allowed.

    Raises:
        TraceError: names the first tensor with a hook, and the method that registered it.
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
    """The hooks on a tensor's gradient, by the method that registers them.

    torch has no public way to list them. ``register_…`` fills both attributes and ``handle.remove()`` empties them;
    tested with torch 2.11 and 2.15.
    """
    return {"register_hook": tensor._backward_hooks, REGISTER_HOOK[1].__name__: tensor._post_accumulate_grad_hooks}


class GradientWatch(TorchFunctionMode):
    """Within ``with``, records where a forward affects gradients in a way that torch.export loses.

    ``hooks``: lines that register a hook on a computed tensor. ``switches``: lines that turn gradients off inside an
    autocast region; torch.export (2.11 and 2.15) makes that region a sub-graph and drops the switch silently.
    ``data``: lines that read or set ``tensor.data``, which torch.export cannot follow and then refuses without a line.
    ``data_set``: those that set it to other memory, which torch.export drops silently.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []
        self.switches: list[str] = []
        self.data: list[str] = []
        self.data_set: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REGISTER_HOOK:
            self.hooks.append(f"{func.__name__}{user_line()}")
        elif turns_gradients_off(func, args) and torch.is_grad_enabled() and in_autocast():
            self.switches.append(user_line())
        elif func in DATA and (line := calling_line()):
            self.data.append(line)
            if func == DATA[1] and not torch._C._is_alias_of(*args):  # type: ignore[attr-defined]
                self.data_set.append(line)
        return func(*args, **(kwargs or {}))


def turns_gradients_off(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a torch function call turns gradients off, as torch.no_grad and torch.set_grad_enabled do."""
    return getattr(func, "__name__", "") == "_set_grad_enabled" and not args[0]


def user_line() -> str:
    """The user's line that is running, for a message."""
    return frame_text(innermost(traceback.extract_stack()))


def calling_line() -> str:
    """The line that called a torch function, if it is the user's; empty if it is torch's own."""
    frames = [frame for frame in traceback.extract_stack()[:-2] if frame.name != "__torch_function__"]
    return "" if is_internal(frames[-1].filename) else frame_text(frames[-1])


def in_autocast() -> bool:
    """Whether an autocast region is active."""
    return any(torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda"))
