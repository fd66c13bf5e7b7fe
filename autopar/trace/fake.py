"""Models on the meta device, traced as if they were on a CPU.

On the meta device a convolution's output has the contiguous memory format. On real devices it follows the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch 2.11 to 2.15 have no public name for it
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopar.ir.graph import Value
from autopar.ir.pytree import tree_map
from autopar.trace.copy_model import copy_model


def as_on_cpu(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A copy of a model and its arguments in which meta tensors are fake CPU tensors, without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # as torch.export sets it too

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    # Lazy parameters have no shape; they stay as they are.
    own: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers()) if is_lazy(t)}
    parameters = {id(p): nn.Parameter(fake(p), p.requires_grad) for p in model.parameters() if id(p) not in own}
    with MetaDeepcopy(fake):
        copy = copy_model(model, own | parameters)
    return copy, *tree_map(lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))


@contextmanager
def fake_tensors(values: Sequence[Value]) -> Iterator[list[Tensor]]:
    """Fake CPU tensors like some values, and within ``with`` those that operations make of them."""
    with FakeTensorMode():
        yield [
            torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="cpu")
            for value in values
        ]


def without_claim(tensor: Tensor) -> Tensor:
    """The meta tensor of a fake CPU tensor; any other tensor itself."""
    return without_device(tensor) if isinstance(tensor, FakeTensor) else tensor


def without_device(tensor: Tensor) -> Tensor:
    """A meta tensor with the tensor's shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class MetaDeepcopy(TorchFunctionMode):
    """Within ``with``, deepcopy copies meta tensors by ``copy``: buffers, and plain tensors that modules hold."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.copy = copy

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and args[0].is_meta:
            return self.copy(args[0])
        return func(*args, **(kwargs or {}))
