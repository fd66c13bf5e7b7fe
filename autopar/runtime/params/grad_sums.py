"""Sums of gradients: taken from autograd's leaves, and added in few kernel launches for any number of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

MIN_KERNEL_ELEMENTS = 2**16  # elements from which a kernel takes longer than its launch
HAS_TRITON = find_spec("triton") is not None


class GradSink(Protocol):
    """Receiver of the gradients that backwards produce."""

    def mark_ready(self, name: str, gradient: torch.Tensor | None) -> None:
        """Take a weight's gradient; None if a layer has added it to the sum itself."""
        ...


def take_gradients(sink: GradSink, name: str, leaf: nn.Parameter) -> RemovableHandle:
    """Pass every gradient that a backward writes into ``leaf`` to ``sink`` instead."""
    receiver = ref(sink)  # a strong reference would be a cycle: sink, leaf, hook

    def on_grad(param: torch.Tensor) -> None:
        if (taking := receiver()) is not None and param.grad is not None:  # the hook runs without a gradient too
            gradient, param.grad = param.grad, None
            taking.mark_ready(name, gradient)

    return leaf.register_post_accumulate_grad_hook(on_grad)


def add_gradients(
    sums: Mapping[str, torch.Tensor], gradients: Sequence[tuple[str, torch.Tensor]], summed: set[str]
) -> None:
    """Add gradients to their sums.

    Args:
        sums: sum of each weight, by name.
        gradients: names and gradients in the order of the additions; a name may come several times.
        summed: names of the sums that hold a number. Other sums are overwritten, and their names added.
    """
    rest = gradients
    while rest:
        batch: dict[str, torch.Tensor] = {}
        later: list[tuple[str, torch.Tensor]] = []
        for name, gradient in rest:
            if name in batch:
                later.append((name, gradient))
            else:
                batch[name] = gradient
        add_distinct(sums, batch, summed)
        rest = later


def add_distinct(sums: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], summed: set[str]) -> None:
    """As `add_gradients`, with at most one gradient of each weight."""
    alike: defaultdict[tuple[torch.dtype, torch.dtype], list[str]] = defaultdict(list)
    for name, gradient in gradients.items():
        alike[sums[name].dtype, gradient.dtype].append(name)
    for (_, dtype), names in alike.items():
        first = [name for name in names if name not in summed]
        if first:
            torch._foreach_copy_([sums[n] for n in first], [gradients[n] for n in first])
        if len(first) < len(names):
            add_to(sums, {name: gradients[name] for name in names if name in summed}, dtype)
    summed.update(gradients)


def add_to(sums: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Add gradients of one dtype to sums that hold a number.

    torch adds a list of tensors in one kernel only if all dtypes are equal (``can_use_fast_route``), but copies
    between dtypes in one kernel. So low-precision gradients are widened together and then added. On GPUs a kernel
    of ours adds large ones directly.
    """
    batched = dict(gradients)
    if dtype != torch.float32:
        for name in [name for name, gradient in gradients.items() if has_kernel(sums[name], gradient)]:
            from autopar.ops.kernels.accumulate import add

            add(sums[name], batched.pop(name))
    if not batched:
        return
    totals, added = [sums[name] for name in batched], list(batched.values())
    if dtype != totals[0].dtype:
        wide = [torch.empty_like(total) for total in totals]
        torch._foreach_copy_(wide, added)
        added = wide
    torch._foreach_add_(totals, added)


def has_kernel(total: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the accumulation kernel fits: for large dense CUDA tensors of one shape [...] and memory order."""
    alike = total.dtype == torch.float32 and total.stride() == gradient.stride() and gradient.is_cuda
    return alike and gradient.numel() >= MIN_KERNEL_ELEMENTS and HAS_TRITON
