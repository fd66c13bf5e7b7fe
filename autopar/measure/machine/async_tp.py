"""Linear layers with a collective before or after them, as two operators and as one fused operator (async TP).

The time that the fused operator saves is communication hidden by matrix products (`autopar.cost.ops.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import autopar.ops.registry  # noqa: F401  (it imports all that define operators)
from autopar.ir.network import CollectiveKind
from autopar.measure.machine.cases import Case
from autopar.measure.machine.points import OpCounts
from autopar.measure.timer import Workload

LayerFunction = Callable[[Tensor, Tensor, int, str], Tensor]  # (input, weight, ranks, name of the axis) -> output
IMAGES = 2  # images of a batch; all_gather_linear gathers their tokens along dim 1


@dataclass(frozen=True)
class AsyncTPOp:
    """An operator of `autopar.ops.async_tp`.

    Args:
        kinds: its collectives forward and backward; None for no collective.
        unfused: the layer as a product and a separate collective.
        fused: the layer as one operator that overlaps the two.
    """

    kinds: tuple[CollectiveKind | None, CollectiveKind]
    unfused: LayerFunction
    fused: LayerFunction


ASYNC_TP_OPS: Mapping[str, AsyncTPOp] = {
    "all_gather_linear": AsyncTPOp(
        ("all-gather", "reduce-scatter"),
        lambda x, w, ranks, axis: F.linear(torch.ops.autopar.all_gather(x, 1, 1, ranks, axis, True), w),
        lambda x, w, ranks, axis: torch.ops.autopar.all_gather_linear(x, w, None, 1, 1, ranks, axis),
    ),
    "linear_with_async_grad_allreduce": AsyncTPOp(
        (None, "all-reduce"),
        lambda x, w, ranks, axis: F.linear(torch.ops.autopar.sum_gradient(x, axis), w),
        lambda x, w, ranks, axis: torch.ops.autopar.linear_with_async_grad_allreduce(x, w, None, axis),
    ),
    "pipelined_all_gather_linear": AsyncTPOp(
        ("all-gather", "reduce-scatter"),
        lambda x, w, ranks, axis: F.linear(torch.ops.autopar.all_gather(x, 0, 1, ranks, axis, True), w),
        lambda x, w, ranks, axis: torch.ops.autopar.pipelined_all_gather_linear(x, w, None, ranks, axis),
    ),
    "pipelined_linear_reduce_scatter": AsyncTPOp(
        ("reduce-scatter", "all-gather"),
        lambda x, w, ranks, axis: torch.ops.autopar.reduce_scatter(F.linear(x, w), 0, 1, ranks, axis),
        lambda x, w, ranks, axis: torch.ops.autopar.pipelined_linear_reduce_scatter(x, w, None, ranks, axis),
    ),
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the product on one rank, and elements of the whole tensor that the collective communicates."""

    rows: int
    in_features: int
    out_features: int
    comm_elements: int


def layer_shape(case: Case) -> LayerShape:
    """Sizes of a case's layer on one rank.

    Each rank multiplies all tokens. It has a share of the input features if sums are scattered, else of the output
    features.
    """
    tokens, in_features, out_features = case.sizes
    tokens -= tokens % (case.ranks * IMAGES)
    if case.variant == "pipelined_linear_reduce_scatter":
        return LayerShape(tokens, in_features // case.ranks, out_features, tokens * out_features)
    return LayerShape(tokens, in_features, out_features // case.ranks, tokens * in_features)


def layer_workload(case: Case, axis: str, device: torch.device) -> Workload:
    """A run of the layer's forward, and of its backward for the input and the weight."""
    shape, dtype, op = layer_shape(case), getattr(torch, case.dtype), ASYNC_TP_OPS[case.variant]
    layer = op.unfused if case.fusion == "unfused" else op.fused
    rows = shape.rows // (case.ranks if op.kinds[0] == "all-gather" else 1)
    sizes = (IMAGES, rows // IMAGES) if case.variant == "all_gather_linear" else (rows,)
    x = torch.randn(*sizes, shape.in_features, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(shape.out_features, shape.in_features, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(layer(x, w, case.ranks, axis))
    return lambda: torch.autograd.grad(layer(x, w, case.ranks, axis), (x, w), gradient)


def layer_op_counts(case: Case) -> tuple[OpCounts, ...]:
    """The forward product, two backward products, and the forward and backward collectives (0 bytes for none)."""
    shape, size = layer_shape(case), getattr(torch, case.dtype).itemsize
    operands = shape.rows * shape.in_features, shape.out_features * shape.in_features
    output_elements = shape.rows * shape.out_features
    flops = 2.0 * shape.rows * shape.in_features * shape.out_features
    backward = OpCounts(flops, (output_elements + 2 * sum(operands)) * size / 2)
    num_bytes = float(symmetric_buffer_bytes(case))
    collectives = (OpCounts(0.0, num_bytes if kind else 0.0) for kind in ASYNC_TP_OPS[case.variant].kinds)
    return (OpCounts(flops, (sum(operands) + output_elements) * size), backward, backward, *collectives)


def symmetric_buffer_bytes(case: Case) -> int:
    """Bytes that the layer's collective needs in each rank's symmetric buffer: the whole tensor."""
    return layer_shape(case).comm_elements * getattr(torch, case.dtype).itemsize
