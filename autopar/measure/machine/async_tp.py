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
from autopar.measure.machine.cases import APART, Case
from autopar.measure.machine.clock import Run
from autopar.measure.machine.points import Part

Layer = Callable[[Tensor, Tensor, int, str], Tensor]  # of what it reads, its weight, and the ranks of an axis
IMAGES = 2  # whose tokens are gathered along the second dim


@dataclass(frozen=True)
class AsyncTPOp:
    """An operator of `autopar.ops.async_tp`: what it communicates, forwards and backwards, and both ways."""

    kinds: tuple[CollectiveKind | None, CollectiveKind]
    unfused: Layer
    fused: Layer


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
class Shape:
    """Rows of the product on one rank, its width, and how many outputs it has; elements of the tensor that travels."""

    rows: int
    read: int
    made: int
    whole: int


def shape_of(case: Case) -> Shape:
    """Each rank has as many tokens; where sums are scattered it has some of the inputs, else some of the outputs."""
    tokens, read, made = case.sizes
    tokens -= tokens % (case.ranks * IMAGES)
    if operator_of(case) == "scattered_rows_linear":
        return Shape(tokens, read // case.ranks, made, tokens * made)
    return Shape(tokens, read, made // case.ranks, tokens * read)


def operator_of(case: Case) -> str:
    """Of "gathered_linear apart" the first."""
    return case.what.split()[0]


def both_ways(case: Case, axis: str, device: torch.device) -> Run:
    """The layer forwards, and backwards for what it reads and for its weight."""
    operator, way = case.what.split()
    shape, dtype = shape_of(case), getattr(torch, case.dtype)
    joint = ASYNC_TP_OPS[operator]
    layer = joint.unfused if way == APART else joint.fused
    rows = shape.rows // (case.ranks if operator.startswith("gathered") else 1)
    sizes = (IMAGES, rows // IMAGES) if operator == "gathered_linear" else (rows,)
    x = torch.randn(*sizes, shape.read, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(shape.made, shape.read, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(layer(x, w, case.ranks, axis))
    return lambda: torch.autograd.grad(layer(x, w, case.ranks, axis), (x, w), gradient)


def layer_parts(case: Case) -> tuple[Part, ...]:
    """The product, two of its backward, and the whole tensors that travel forwards and backwards, none as 0 bytes."""
    shape, size = shape_of(case), getattr(torch, case.dtype).itemsize
    operands = shape.rows * shape.read, shape.made * shape.read
    made = shape.rows * shape.made
    flops = 2.0 * shape.rows * shape.read * shape.made
    backward = Part(flops, (made + 2 * sum(operands)) * size / 2)
    travels = (
        Part(0.0, float(symmetric_buffer_bytes(case) if kind else 0)) for kind in ASYNC_TP_OPS[operator_of(case)].kinds
    )
    return (Part(flops, (sum(operands) + made) * size), backward, backward, *travels)


def symmetric_buffer_bytes(case: Case) -> int:
    """What the collective takes of each board, the whole tensor."""
    return shape_of(case).whole * getattr(torch, case.dtype).itemsize
