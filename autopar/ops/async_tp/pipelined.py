"""Linear layers that multiply one rank's rows while another rank's rows are transferred.

Each rank has a part of the first dim. An input is gathered while this rank's own rows are multiplied; then the peers'
rows are. An output is computed for the peers first and transferred while this rank's own rows are multiplied. Backwards
do the same with gradients.

torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter give equal bits. For a ViT-L layer of 16 and
64 images the first takes 7 to 15 % and the second 34 to 40 % longer: two NVIDIA H200, torch 2.11, CUDA graphs, bf16
(docs/benchmarks.md, "Symmetric memory: torch's operators and autopar's").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ops.async_tp.input_grad import LinearWithAsyncGradReduce, save_for_linear_backward
from autopar.ops.async_tp.side_stream import on_side_stream
from autopar.ops.collectives import all_gather, empty_resized, on

Multiply = Callable[[Tensor, Tensor], None]  # rows, and the tensor for their product
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, int ranks, str axis) -> Tensor"


def linear_into(weight: Tensor, bias: Tensor | None) -> Multiply:
    """A function that writes the linear layer of rows [..., in] into a tensor [..., out].

    Args:
        weight: [out, in].
        bias: [out].
    """

    def multiply(rows: Tensor, out: Tensor) -> None:
        rows, out = rows.flatten(0, -2), out.flatten(0, -2)
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)

    return multiply


def pipelined_all_gather_matmul(
    multiply: Multiply, x: Tensor, columns: int, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    """The product [ranks · rows, ..., columns] of all ranks' rows, and the gathered rows [ranks · rows, ..., in].

    Args:
        x: this rank's rows, [rows, ..., in].
    """
    communicator = on(axis, ranks)
    rank, x = communicator.rank, x.contiguous()
    gathered, product = x.new_empty([ranks, *x.shape]), x.new_empty([ranks, *x.shape[:-1], columns])
    with on_side_stream(x.device) as join:
        published = communicator.publish(x)
    multiply(x, product[rank])
    gathered[rank].copy_(x)
    join()
    peer_slices = [some for some in (slice(rank), slice(rank + 1, ranks)) if len(gathered[some])]
    with on_side_stream(x.device) as join:
        for peers in peer_slices:
            gathered[peers].copy_(published[peers])
    for peers in peer_slices:
        multiply(published[peers], product[peers])
    join()
    communicator.unpublish()
    return product.flatten(0, 1), gathered.flatten(0, 1)


@torch.library.custom_op(
    "autopar::pipelined_all_gather_linear_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int ranks, str axis) -> (Tensor, Tensor)",
)
def pipelined_all_gather_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    """The layer [ranks · rows, ..., out] of all ranks' rows, and the gathered rows [ranks · rows, ..., in].

    Args:
        x: this rank's rows, [rows, ..., in].
        weight: [out, in].
        bias: [out].
    """
    return pipelined_all_gather_matmul(linear_into(weight, bias), x, len(weight), ranks, axis)


@torch.library.custom_op("autopar::pipelined_linear_reduce_scatter_forward", mutates_args=(), schema=SCHEMA)
def pipelined_linear_reduce_scatter_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str
) -> Tensor:
    """This rank's rows [rows, ..., out] of the sum of all ranks' layers.

    Args:
        x: [ranks · rows, ..., in].
        weight: [out, in].
        bias: [out].
    """
    communicator, multiply = on(axis, ranks), linear_into(weight, bias)
    rows = x.contiguous().unflatten(0, (ranks, -1))
    product = x.new_empty([*rows.shape[:-1], len(weight)])
    for k in communicator.peer_order():
        multiply(rows[k], product[k])
        with on_side_stream(x.device):
            communicator.push_shard(k, product)
    multiply(rows[communicator.rank], product[communicator.rank])
    with on_side_stream(x.device) as join:
        total = communicator.reduce_pushed(product)
    join()
    return total


@torch.library.custom_op("autopar::pipelined_linear_reduce_scatter_backward", mutates_args=())
def pipelined_linear_reduce_scatter_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, ranks: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight, and the layer's output before the reduce-scatter, [ranks · rows, ..., out].

    Args:
        gradient: of this rank's rows of the output, [rows, ..., out].
        x: input, [ranks · rows, ..., in].
        weight: [out, in].
    """
    grad_x, gathered = pipelined_all_gather_matmul(
        linear_into(weight.t(), None), gradient, weight.shape[1], ranks, axis
    )
    return grad_x, gathered.flatten(0, -2).t() @ x.flatten(0, -2), gathered


@pipelined_all_gather_linear_forward.register_fake
def _fake_pipelined_all_gather_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str
) -> tuple[Tensor, Tensor]:
    gathered = empty_resized(x, {0: ranks * x.shape[0]})
    return empty_resized(gathered, {x.dim() - 1: weight.shape[0]}), gathered


@pipelined_linear_reduce_scatter_forward.register_fake
def _fake_pipelined_linear_reduce_scatter_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str
) -> Tensor:
    return empty_resized(x, {0: x.shape[0] // ranks, x.dim() - 1: weight.shape[0]})


@pipelined_linear_reduce_scatter_backward.register_fake
def _fake_pipelined_linear_reduce_scatter_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, ranks: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_resized(x, {}), empty_resized(weight, {}), empty_resized(gradient, {0: x.shape[0]})


class _PipelinedAllGatherLinear(LinearWithAsyncGradReduce):
    """As `LinearWithAsyncGradReduce` of a gathered input, but with a pipelined forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: bool, *comm_args: Any) -> Tensor:
        product, gathered = pipelined_all_gather_linear_forward(x, weight, bias, *comm_args[2:])
        save_for_linear_backward(ctx, gathered, weight)
        ctx.gathers, ctx.comm_args = gathers, comm_args
        return product


class _PipelinedLinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
        save_for_linear_backward(ctx, x, weight)
        ctx.comm_args = ranks, axis
        return pipelined_linear_reduce_scatter_forward(x, weight, bias, ranks, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        x_needed, weight_needed, bias_needed, *_ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if x_needed and weight_needed:
            grad_x, grad_weight, gathered = pipelined_linear_reduce_scatter_backward(
                gradient, x, weight, *ctx.comm_args
            )
        else:
            gathered = all_gather(gradient, 0, 1, *ctx.comm_args, False)
            grad_x = gathered @ weight if x_needed else None
            grad_weight = gathered.flatten(0, -2).t() @ x.flatten(0, -2) if weight_needed else None
        return grad_x, grad_weight, gathered.flatten(0, -2).sum(0) if bias_needed else None, None, None


torch.library.define("autopar::pipelined_all_gather_linear", SCHEMA)
torch.library.define("autopar::pipelined_linear_reduce_scatter", SCHEMA)


@torch.library.impl("autopar::pipelined_all_gather_linear", "CompositeImplicitAutograd")
def pipelined_all_gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
    """A linear layer of all ranks' rows; each rank computes a part of the output features: [ranks · rows, ..., out].

    Args:
        x: this rank's rows, [rows, ..., in].
        weight: [out, in].
        bias: [out].
    """
    return _PipelinedAllGatherLinear.apply(x, weight, bias, True, 0, 1, ranks, axis)  # type: ignore[return-value]


@torch.library.impl("autopar::pipelined_linear_reduce_scatter", "CompositeImplicitAutograd")
def pipelined_linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int, axis: str) -> Tensor:
    """This rank's rows [rows, ..., out] of a linear layer whose input features are split over the ranks.

    Args:
        x: [ranks · rows, ..., in].
        weight: [out, in].
        bias: [out].
    """
    return _PipelinedLinearReduceScatter.apply(x, weight, bias, ranks, axis)  # type: ignore[return-value]
