"""Linear layers whose input's gradient travels while the weight's is computed.

Where ranks split a weight by its outputs, each computes a summand of the input's gradient. To sum these takes a
collective, which nothing in the weight's gradient waits for. These operators do both at once; results are those of a
collective followed by ``aten.linear``.

| operator | is | gradient of x beside that of the weight |
|---|---|---|
| gathered_linear(x, weight, bias, dim, outer, ranks, axis) | all_gather, then linear | reduce_scatter |
| summed_linear(x, weight, bias, axis) | sum_gradient, then linear | all_reduce |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import collectives
from autopar.collectives import on, parts, resized

STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """On a GPU what is inside runs beside what follows, until the callable that this gives is called."""
    if device.type != "cuda":
        yield lambda: None
        return
    if device not in STREAMS:
        # First in line for multiprocessors: little work, and others wait for it.
        STREAMS[device] = torch.cuda.Stream(device, priority=-1)
    stream = STREAMS[device]
    # Also before what the last user's memory is used for anew, which is this stream's.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield lambda: torch.cuda.current_stream(device).wait_stream(stream)


@torch.library.custom_op("autopar::scattered_linear_backward", mutates_args=())
def scattered_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, dim: int, outer: int, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    """This rank's part of the gradient of a gathered ``x``, and the weight's."""
    rows = gradient.flatten(0, -2)
    whole = (rows @ weight).view(x.shape)
    stacked = parts(whole, dim, outer, ranks).contiguous()
    with beside(x.device) as join:
        part = on(axis, ranks).reduce_scatter(stacked, beside=True)
    for_weight = rows.t() @ x.flatten(0, -2)
    join()
    return part, for_weight


@torch.library.custom_op("autopar::summed_linear_backward", mutates_args=())
def summed_linear_backward(gradient: Tensor, x: Tensor, weight: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """The gradient of an ``x`` that all ranks have, and the weight's."""
    rows = gradient.flatten(0, -2)
    total = (rows @ weight).view(x.shape)
    with beside(x.device) as join:
        on(axis).all_reduce(total, beside=True)
    for_weight = rows.t() @ x.flatten(0, -2)
    join()
    return total, for_weight


@scattered_linear_backward.register_fake
def _part_and_weight(
    gradient: Tensor, x: Tensor, weight: Tensor, dim: int, outer: int, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    return resized(x, {dim: x.shape[dim] // ranks}), resized(weight, {})


@summed_linear_backward.register_fake
def _whole_and_weight(gradient: Tensor, x: Tensor, weight: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    return resized(x, {}), resized(weight, {})


def bias_gradient(gradient: Tensor, bias_needed: bool) -> Tensor | None:
    return gradient.flatten(0, -2).sum(0) if bias_needed else None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *where: Any) -> Tensor:
        whole = collectives.all_gather(x, *where, True)
        ctx.save_for_backward(whole, weight)
        ctx.where = where
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        whole, weight = ctx.saved_tensors
        for_bias = bias_gradient(gradient, ctx.needs_input_grad[2])
        if not ctx.needs_input_grad[1]:
            return collectives.reduce_scatter(gradient @ weight, *ctx.where), None, for_bias, None, None, None, None
        for_x, for_weight = scattered_linear_backward(gradient, whole, weight, *ctx.where)
        return for_x, for_weight, for_bias, None, None, None, None


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for_bias = bias_gradient(gradient, ctx.needs_input_grad[2])
        if not ctx.needs_input_grad[1]:
            return collectives.all_reduce(gradient @ weight, ctx.axis), None, for_bias, None
        for_x, for_weight = summed_linear_backward(gradient, x, weight, ctx.axis)
        return for_x, for_weight, for_bias, None


torch.library.define(
    "autopar::gathered_linear",
    "(Tensor x, Tensor weight, Tensor? bias, int dim, int outer, int ranks, str axis) -> Tensor",
)
torch.library.define("autopar::summed_linear", "(Tensor x, Tensor weight, Tensor? bias, str axis) -> Tensor")


@torch.library.impl("autopar::gathered_linear", "CompositeImplicitAutograd")
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *where: Any) -> Tensor:
    """A linear layer of the whole tensor of which each rank has a part; ``where`` is dim, outer, ranks and axis."""
    return _GatheredLinear.apply(x, weight, bias, *where)  # type: ignore[return-value]


@torch.library.impl("autopar::summed_linear", "CompositeImplicitAutograd")
def summed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: str) -> Tensor:
    """A linear layer of a tensor that all ranks have, each with a part of the outputs."""
    return _SummedLinear.apply(x, weight, bias, axis)  # type: ignore[return-value]
