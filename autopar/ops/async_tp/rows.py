"""Linear layers that multiply one rank's rows while another rank's rows are transferred.

Each rank has a part of the first dim. An input is gathered while this rank's own rows are multiplied; then the peers'
rows are. An output is computed for the peers first and transferred while this rank's own rows are multiplied. Backwards
do the same with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ops.async_tp.input_grad import OverlappedLinear
from autopar.ops.async_tp.side_stream import on_side_stream
from autopar.ops.collectives import all_gather, empty_resized, on

Multiply = Callable[[Tensor, Tensor], None]  # rows, and the tensor for their product


def linear_into(weight: Tensor, bias: Tensor | None) -> Multiply:
    """A function that writes the product of rows [..., in] with ``weight`` [out, in] into a tensor [..., out]."""

    def multiply(rows: Tensor, out: Tensor) -> None:
        rows, out = rows.flatten(0, -2), out.flatten(0, -2)
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)

    return multiply


def gather_and_multiply(multiply: Multiply, x: Tensor, columns: int, ranks: int, axis: str) -> tuple[Tensor, Tensor]:
    """The product [ranks · rows, ..., columns] of all ranks' rows, and the gathered rows [ranks · rows, ...]."""
    communicator = on(axis, ranks)
    rank, x = communicator.rank, x.contiguous()
    whole, product = x.new_empty([ranks, *x.shape]), x.new_empty([ranks, *x.shape[:-1], columns])
    with on_side_stream(x.device) as join:
        published = communicator.publish(x)
    multiply(x, product[rank])
    whole[rank].copy_(x)
    join()
    peer_slices = [some for some in (slice(rank), slice(rank + 1, ranks)) if len(whole[some])]
    with on_side_stream(x.device) as join:
        for peers in peer_slices:
            whole[peers].copy_(published[peers])
    for peers in peer_slices:
        multiply(published[peers], product[peers])
    join()
    communicator.unpublish()
    return product.flatten(0, 1), whole.flatten(0, 1)


@torch.library.custom_op(
    "autopar::gathered_rows_linear_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int ranks, str axis) -> (Tensor, Tensor)",
)
def gathered_rows_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    """The layer of all ranks' rows, and the gathered rows."""
    return gather_and_multiply(linear_into(weight, bias), x, len(weight), ranks, axis)


@torch.library.custom_op(
    "autopar::scattered_rows_linear_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int ranks, str axis) -> Tensor",
)
def scattered_rows_linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
    """This rank's rows of the sum of all ranks' layers."""
    communicator, multiply = on(axis, ranks), linear_into(weight, bias)
    rows = x.contiguous().unflatten(0, (ranks, -1))
    made = x.new_empty([*rows.shape[:-1], len(weight)])
    for k in communicator.peer_order():
        multiply(rows[k], made[k])
        with on_side_stream(x.device):
            communicator.push_shard(k, made)
    multiply(rows[communicator.rank], made[communicator.rank])
    with on_side_stream(x.device) as join:
        total = communicator.reduce_pushed(made)
    join()
    return total


@torch.library.custom_op("autopar::scattered_rows_linear_backward", mutates_args=())
def scattered_rows_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, ranks: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and weight, and the whole gradient of the layer's output."""
    for_x, whole = gather_and_multiply(linear_into(weight.t(), None), gradient, weight.shape[1], ranks, axis)
    return for_x, whole.flatten(0, -2).t() @ x.flatten(0, -2), whole


@gathered_rows_linear_forward.register_fake
def _made_and_whole(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> tuple[Tensor, Tensor]:
    whole = empty_resized(x, {0: ranks * x.shape[0]})
    return empty_resized(whole, {x.dim() - 1: weight.shape[0]}), whole


@scattered_rows_linear_forward.register_fake
def _part(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
    return empty_resized(x, {0: x.shape[0] // ranks, x.dim() - 1: weight.shape[0]})


@scattered_rows_linear_backward.register_fake
def _gradients(gradient: Tensor, x: Tensor, weight: Tensor, ranks: int, axis: str) -> tuple[Tensor, Tensor, Tensor]:
    return empty_resized(x, {}), empty_resized(weight, {}), empty_resized(gradient, {0: x.shape[0]})


class _GatheredRowsLinear(OverlappedLinear):
    """Its backward is that of any gathered layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: bool, *where: Any) -> Tensor:
        made, whole = gathered_rows_linear_forward(x, weight, bias, *where[2:])
        ctx.save_for_backward(whole, weight)
        ctx.gathers, ctx.where = gathers, where
        return made


class _ScatteredRowsLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.where = ranks, axis
        return scattered_rows_linear_forward(x, weight, bias, ranks, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        x_needed, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        for_x = for_weight = None
        if x_needed and weight_needed:
            for_x, for_weight, whole = scattered_rows_linear_backward(gradient, x, weight, *ctx.where)
        else:
            whole = all_gather(gradient, 0, 1, *ctx.where, False)
            for_x = whole @ weight if x_needed else None
            for_weight = whole.flatten(0, -2).t() @ x.flatten(0, -2) if weight_needed else None
        return for_x, for_weight, whole.flatten(0, -2).sum(0) if bias_needed else None, None, None


for name in ("gathered", "scattered"):
    torch.library.define(
        f"autopar::{name}_rows_linear", "(Tensor x, Tensor weight, Tensor? bias, int ranks, str axis) -> Tensor"
    )


@torch.library.impl("autopar::gathered_rows_linear", "CompositeImplicitAutograd")
def gathered_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
    """A linear layer of the rows of all ranks; each rank computes a part of the outputs."""
    return _GatheredRowsLinear.apply(x, weight, bias, True, 0, 1, ranks, axis)  # type: ignore[return-value]


@torch.library.impl("autopar::scattered_rows_linear", "CompositeImplicitAutograd")
def scattered_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
    """This rank's rows of a linear layer whose inputs are split over the ranks."""
    return _ScatteredRowsLinear.apply(x, weight, bias, ranks, axis)  # type: ignore[return-value]
