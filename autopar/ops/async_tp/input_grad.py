"""Linear layers whose input gradient is reduced while the weight gradient is computed.

Where ranks split a weight by its outputs, each computes a summand of the input's gradient. Their sum takes a
collective, which the weight's gradient does not wait for (Megatron's linear with asynchronous gradient all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import collectives
from autopar.ops.async_tp.side_stream import on_side_stream
from autopar.ops.collectives import empty_resized, local_size, on, stack_parts, without_padding


def reduce_and_compute_wgrad(grad_rows: Tensor, x: Tensor, reduce: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The result of ``reduce``, run on the side stream, and the weight's gradient [out, in], computed meanwhile.

    Args:
        grad_rows: gradient of the layer's output, [rows, out].
        x: input of the layer, [..., in], of as many rows.
    """
    with on_side_stream(x.device) as join:
        grad_x = reduce()
    grad_weight = grad_rows.t() @ x.flatten(0, -2)
    join()
    return grad_x, grad_weight


@torch.library.custom_op("autopar::all_gather_linear_backward", mutates_args=())
def all_gather_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, dim: int, outer: int, ranks: int, axis: str,
    ragged: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's part of the input, and of the weight.

    Args:
        gradient: of the layer's output, [..., out].
        x: gathered input, [..., in].
        weight: [out, in].
    """
    grad_rows = gradient.flatten(0, -2)
    stacked = stack_parts((grad_rows @ weight).view(x.shape), dim, outer, ranks, ragged).contiguous()

    def reduce() -> Tensor:
        part = on(axis, ranks).reduce_scatter(stacked, overlapped=True)
        return without_padding(part, dim, outer, ranks, ragged)

    return reduce_and_compute_wgrad(grad_rows, x, reduce)


@torch.library.custom_op("autopar::linear_with_async_grad_allreduce_backward", mutates_args=())
def linear_with_async_grad_allreduce_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the replicated input and of the weight.

    Args:
        gradient: of the layer's output, [..., out].
        x: input, [..., in].
        weight: [out, in].
    """
    grad_rows = gradient.flatten(0, -2)
    grad_x = (grad_rows @ weight).view(x.shape)

    def reduce() -> Tensor:
        on(axis).all_reduce(grad_x, overlapped=True)
        return grad_x

    return reduce_and_compute_wgrad(grad_rows, x, reduce)


@all_gather_linear_backward.register_fake
def _fake_all_gather_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, dim: int, outer: int, ranks: int, axis: str,
    ragged: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_resized(x, {dim: local_size(x.shape[dim], outer, ranks, ragged)}), empty_resized(weight, {})


@linear_with_async_grad_allreduce_backward.register_fake
def _fake_linear_with_async_grad_allreduce_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: str
) -> tuple[Tensor, Tensor]:
    return empty_resized(x, {}), empty_resized(weight, {})


def save_for_linear_backward(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Save a linear layer's weight, its second input, and ``x``, which only a trained weight's gradient needs."""
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


class LinearWithAsyncGradReduce(torch.autograd.Function):
    """A linear layer of ``x`` [..., in], ``weight`` [out, in] and ``bias`` [out], gathering ``x`` first if ``gathers``.

    ``comm_args`` are the collective's arguments: dim, outer, ranks, axis and ragged of an all-gather, or the axis of a
    sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: bool, *comm_args: Any) -> Tensor:
        whole = collectives.all_gather(x, *comm_args[:4], True, *comm_args[4:]) if gathers else x
        save_for_linear_backward(ctx, whole, weight)
        ctx.gathers, ctx.comm_args = gathers, comm_args
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        whole, weight = ctx.saved_tensors
        _, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        if weight_needed:
            backward = all_gather_linear_backward if ctx.gathers else linear_with_async_grad_allreduce_backward
            grad_x, grad_weight = backward(gradient, whole, weight, *ctx.comm_args)
        else:
            reduce = collectives.reduce_scatter if ctx.gathers else collectives.all_reduce
            grad_x, grad_weight = reduce(gradient @ weight, *ctx.comm_args), None
        # After the operator: a compiler would compute the gradient twice if the bias sum came first.
        grad_bias = gradient.flatten(0, -2).sum(0) if bias_needed else None
        return grad_x, grad_weight, grad_bias, None, *[None] * len(ctx.comm_args)


torch.library.define(
    "autopar::all_gather_linear",
    "(Tensor x, Tensor weight, Tensor? bias, int dim, int outer, int ranks, str axis, int[]? ragged=None) -> Tensor",
)
torch.library.define(
    "autopar::linear_with_async_grad_allreduce", "(Tensor x, Tensor weight, Tensor? bias, str axis) -> Tensor"
)


@torch.library.impl("autopar::all_gather_linear", "CompositeImplicitAutograd")
def all_gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *comm_args: Any) -> Tensor:
    """A linear layer of the gathered tensor; each rank computes a part of the output features: [..., out].

    Args:
        x: this rank's part, [..., in].
        weight: [out, in].
        bias: [out].
        comm_args: dim, outer, ranks, axis, and ragged where parts differ in size.
    """
    return LinearWithAsyncGradReduce.apply(x, weight, bias, True, *comm_args)  # type: ignore[return-value]


@torch.library.impl("autopar::linear_with_async_grad_allreduce", "CompositeImplicitAutograd")
def linear_with_async_grad_allreduce(x: Tensor, weight: Tensor, bias: Tensor | None, axis: str) -> Tensor:
    """A linear layer of a replicated tensor; each rank computes a part of the output features: [..., out].

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].
    """
    return LinearWithAsyncGradReduce.apply(x, weight, bias, False, axis)  # type: ignore[return-value]
