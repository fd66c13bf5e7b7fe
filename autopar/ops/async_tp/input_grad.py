"""Linear layers whose input gradient is reduced while the weight gradient is computed.

Where ranks split a weight by its outputs, each computes a summand of the input's gradient. Their sum takes a
collective, which the weight's gradient does not wait for (Megatron's linear with asynchronous gradient all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import collectives
from autopar.ops.async_tp.side_stream import on_side_stream
from autopar.ops.collectives import empty_resized, on, stack_parts


def send_and_weight_gradient(rows: Tensor, x: Tensor, send: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The result of ``send``, run on the side stream, and the weight's gradient, computed meanwhile.

    Args:
        rows: gradient of the layer's output, [rows, out].
        x: input of the layer, [..., in].
    """
    with on_side_stream(x.device) as join:
        for_x = send()
    for_weight = rows.t() @ x.flatten(0, -2)
    join()
    return for_x, for_weight


@torch.library.custom_op("autopar::gathered_linear_backward", mutates_args=())
def gathered_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, dim: int, outer: int, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    """This rank's part of the gradient of a gathered ``x``, and the weight's gradient."""
    rows = gradient.flatten(0, -2)
    stacked = stack_parts((rows @ weight).view(x.shape), dim, outer, ranks).contiguous()
    return send_and_weight_gradient(rows, x, lambda: on(axis, ranks).reduce_scatter(stacked, overlapped=True))


@torch.library.custom_op("autopar::summed_linear_backward", mutates_args=())
def summed_linear_backward(gradient: Tensor, x: Tensor, weight: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """The gradient of an ``x`` that all ranks have, and the weight's gradient."""
    rows = gradient.flatten(0, -2)
    total = (rows @ weight).view(x.shape)

    def send() -> Tensor:
        on(axis).all_reduce(total, overlapped=True)
        return total

    return send_and_weight_gradient(rows, x, send)


@gathered_linear_backward.register_fake
def _part_and_weight(
    gradient: Tensor, x: Tensor, weight: Tensor, dim: int, outer: int, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    return empty_resized(x, {dim: x.shape[dim] // ranks}), empty_resized(weight, {})


@summed_linear_backward.register_fake
def _whole_and_weight(gradient: Tensor, x: Tensor, weight: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    return empty_resized(x, {}), empty_resized(weight, {})


class OverlappedLinear(torch.autograd.Function):
    """``where`` are the collective's arguments: dim, outer, ranks and axis of an all-gather, the axis of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: bool, *where: Any) -> Tensor:
        whole = collectives.all_gather(x, *where, True) if gathers else x
        ctx.save_for_backward(whole, weight)
        ctx.gathers, ctx.where = gathers, where
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        whole, weight = ctx.saved_tensors
        _, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        if weight_needed:
            both = gathered_linear_backward if ctx.gathers else summed_linear_backward
            for_x, for_weight = both(gradient, whole, weight, *ctx.where)
        else:
            send = collectives.reduce_scatter if ctx.gathers else collectives.all_reduce
            for_x, for_weight = send(gradient @ weight, *ctx.where), None
        # After the operator: a compiler would compute the gradient twice if the bias sum came first.
        for_bias = gradient.flatten(0, -2).sum(0) if bias_needed else None
        return for_x, for_weight, for_bias, None, *[None] * len(ctx.where)


torch.library.define(
    "autopar::gathered_linear",
    "(Tensor x, Tensor weight, Tensor? bias, int dim, int outer, int ranks, str axis) -> Tensor",
)
torch.library.define("autopar::summed_linear", "(Tensor x, Tensor weight, Tensor? bias, str axis) -> Tensor")


@torch.library.impl("autopar::gathered_linear", "CompositeImplicitAutograd")
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *where: Any) -> Tensor:
    """A linear layer of the whole tensor of the ranks' parts; ``where`` is dim, outer, ranks and axis."""
    return OverlappedLinear.apply(x, weight, bias, True, *where)  # type: ignore[return-value]


@torch.library.impl("autopar::summed_linear", "CompositeImplicitAutograd")
def summed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: str) -> Tensor:
    """A linear layer of a replicated tensor; each rank computes a part of the outputs."""
    return OverlappedLinear.apply(x, weight, bias, False, axis)  # type: ignore[return-value]
