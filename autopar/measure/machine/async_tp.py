"""Linear layers with the collective before or behind them, one after the other and as the operator that is both.

What these two take differs by what products hide of collectives (`autopar.cost.ops.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import autopar.ops.registry  # noqa: F401  (it imports all that define operators)
from autopar.ir.hardware import CollectiveKind
from autopar.measure.machine.cases import UNFUSED, Case
from autopar.measure.machine.points import OpCounts
from autopar.measure.timer import Workload

LayerFunction = Callable[[Tensor, Tensor, int, str], Tensor]  # of what it reads, its weight, and the ranks of an axis
IMAGES = 2  # whose tokens are gathered along the second dim


@dataclass(frozen=True)
class AsyncTPOp:
    """An operator of `autopar.ops.async_tp`: what it communicates, forwards and backwards, and both ways."""

    kinds: tuple[CollectiveKind | None, CollectiveKind]
    unfused: LayerFunction
    fused: LayerFunction


ASYNC_TP_OPS: Mapping[str, AsyncTPOp] = {
    "gathered_linear": AsyncTPOp(
        ("all-gather", "reduce-scatter"),
        lambda x, w, ranks, axis: F.linear(torch.ops.autopar.all_gather(x, 1, 1, ranks, axis, True), w),
        lambda x, w, ranks, axis: torch.ops.autopar.gathered_linear(x, w, None, 1, 1, ranks, axis),
    ),
    "summed_linear": AsyncTPOp(
        (None, "all-reduce"),
        lambda x, w, ranks, axis: F.linear(torch.ops.autopar.sum_gradient(x, axis), w),
        lambda x, w, ranks, axis: torch.ops.autopar.summed_linear(x, w, None, axis),
    ),
    "gathered_rows_linear": AsyncTPOp(
        ("all-gather", "reduce-scatter"),
        lambda x, w, ranks, axis: F.linear(torch.ops.autopar.all_gather(x, 0, 1, ranks, axis, True), w),
        lambda x, w, ranks, axis: torch.ops.autopar.gathered_rows_linear(x, w, None, ranks, axis),
    ),
    "scattered_rows_linear": AsyncTPOp(
        ("reduce-scatter", "all-gather"),
        lambda x, w, ranks, axis: torch.ops.autopar.reduce_scatter(F.linear(x, w), 0, 1, ranks, axis),
        lambda x, w, ranks, axis: torch.ops.autopar.scattered_rows_linear(x, w, None, ranks, axis),
    ),
}


@dataclass(frozen=True)
class LayerShape:
    """Rows of the product on one rank, its width, and how many outputs it has; elements of the tensor that travels."""

    rows: int
    in_features: int
    out_features: int
    comm_elements: int


def layer_shape(case: Case) -> LayerShape:
    """Each rank has as many tokens; where sums are scattered it has some of the inputs, else some of the outputs."""
    tokens, read, made = case.sizes
    tokens -= tokens % (case.ranks * IMAGES)
    if operator_name(case) == "scattered_rows_linear":
        return LayerShape(tokens, read // case.ranks, made, tokens * made)
    return LayerShape(tokens, read, made // case.ranks, tokens * read)


def operator_name(case: Case) -> str:
    """Of "gathered_linear apart" the first."""
    return case.variant.split()[0]


def layer_workload(case: Case, axis: str, device: torch.device) -> Workload:
    """The layer forwards, and backwards for what it reads and for its weight."""
    operator, way = case.variant.split()
    shape, dtype = layer_shape(case), getattr(torch, case.dtype)
    op = ASYNC_TP_OPS[operator]
    layer = op.unfused if way == UNFUSED else op.fused
    rows = shape.rows // (case.ranks if operator.startswith("gathered") else 1)
    sizes = (IMAGES, rows // IMAGES) if operator == "gathered_linear" else (rows,)
    x = torch.randn(*sizes, shape.in_features, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(shape.out_features, shape.in_features, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(layer(x, w, case.ranks, axis))
    return lambda: torch.autograd.grad(layer(x, w, case.ranks, axis), (x, w), gradient)


def layer_op_counts(case: Case) -> tuple[OpCounts, ...]:
    """The product, two of its backward, and the whole tensors that travel forwards and backwards, none as 0 bytes."""
    shape, size = layer_shape(case), getattr(torch, case.dtype).itemsize
    operands = shape.rows * shape.in_features, shape.out_features * shape.in_features
    output_elements = shape.rows * shape.out_features
    flops = 2.0 * shape.rows * shape.in_features * shape.out_features
    backward = OpCounts(flops, (output_elements + 2 * sum(operands)) * size / 2)
    messages = (
        OpCounts(0.0, float(symmetric_buffer_bytes(case) if kind else 0))
        for kind in ASYNC_TP_OPS[operator_name(case)].kinds
    )
    return (OpCounts(flops, (sum(operands) + output_elements) * size), backward, backward, *messages)


def symmetric_buffer_bytes(case: Case) -> int:
    """What the collective takes of each board, the whole tensor."""
    return layer_shape(case).comm_elements * getattr(torch, case.dtype).itemsize
