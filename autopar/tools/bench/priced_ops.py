"""Prices of a plan's operations, summed over operations of equal target and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost.ops.collective_cost import is_collective
from autopar.cost.ops.op_cost import OpCost, Pricing, op_costs, op_kind
from autopar.ir.graph import Op, Value, Weight
from autopar.ir.hardware import Launch, OpKind


@dataclass(frozen=True)
class PricedOps:
    """Operations of one target that read and write tensors of the same shapes, and their summed price.

    Args:
        operands, outputs: of one operation, as `tensor_text` writes them.
        names: of the operations.
        backward_seconds: without ``extra_traffic_seconds``.
        extra_traffic_seconds: second passes over memory and the accumulation into main gradients, in the backward.
        flops: of the forward.
        num_bytes: of operands and outputs.
    """

    target: str
    kind: OpKind | Literal["collective"]
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    names: tuple[str, ...]
    count: int
    forward_seconds: float
    backward_seconds: float
    extra_traffic_seconds: float
    flops: float
    num_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a microbatch."""
        return self.forward_seconds + self.backward_seconds + self.extra_traffic_seconds


@dataclass(frozen=True)
class PricedGraph:
    """Prices of one microbatch: rows of operations, the most expensive first, and the pauses between their kernels."""

    rows: tuple[PricedOps, ...]
    pause_seconds: float


def priced_graph(pricing: Pricing) -> PricedGraph:
    """Prices of a graph's operations without the launch overhead, and the sum of the launch overheads.

    Operations that cost nothing, such as views, have no row.
    """
    without_launch = replace(pricing, hardware=replace(pricing.hardware, launch=Launch(0.0, 0.0, 0.0)))
    costs, full_costs = op_costs(without_launch), op_costs(pricing)
    groups: dict[tuple, list[Op]] = {}
    for op in pricing.graph.ops:
        if sum_seconds(full_costs[op.name]) > 0:
            key = op.target, row_kind(op, pricing), *shapes(op, pricing)
            groups.setdefault(key, []).append(op)
    rows = [priced_ops(ops, costs, pricing) for ops in groups.values()]
    pauses = sum(map(sum_seconds, full_costs.values())) - sum(map(sum_seconds, costs.values()))
    return PricedGraph(tuple(sorted(rows, key=lambda row: -row.seconds)), pauses)


def sum_seconds(cost: OpCost) -> float:
    """Forward and backward seconds of an operation."""
    return cost.forward_seconds + cost.backward_seconds


def shapes(op: Op, pricing: Pricing) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts of an operation's operands and of its outputs."""
    graph = pricing.graph
    read = (graph.weight[name] if name in graph.weight else graph.values[name] for name in op.reads)
    return tuple(map(tensor_text, read)), tuple(map(tensor_text, op.outputs))


def tensor_text(tensor: Value | Weight) -> str:
    """Dtype and shape: ``bfloat16[64, 197, 768]``; ``weight bfloat16[768, 768]`` for a weight."""
    prefix = "weight " if isinstance(tensor, Weight) else ""
    return f"{prefix}{tensor.dtype}{list(tensor.shape)}"


def row_kind(op: Op, pricing: Pricing) -> OpKind | Literal["collective"]:
    """Kind of an operation; that of sharding's operations is "collective"."""
    if is_collective(op):
        return "collective"
    return op_kind(op, pricing.graph, pricing.stats.ops[op.name].forward_flops)


def priced_ops(ops: Sequence[Op], costs: Mapping[str, OpCost], pricing: Pricing) -> PricedOps:
    """The row of operations of one target and equal shapes."""
    first, own = ops[0], [costs[op.name] for op in ops]
    operands, outputs = shapes(first, pricing)
    extra = sum(cost.extra_traffic_seconds for cost in own)
    num_bytes = sum(map(pricing.num_bytes, (*first.reads, *(v.name for v in first.outputs))))
    return PricedOps(
        target=first.target,
        kind=row_kind(first, pricing),
        operands=operands,
        outputs=outputs,
        names=tuple(op.name for op in ops),
        count=len(ops),
        forward_seconds=sum(cost.forward_seconds for cost in own),
        backward_seconds=sum(cost.backward_seconds for cost in own) - extra,
        extra_traffic_seconds=extra,
        flops=sum(cost.flops for cost in own),
        num_bytes=len(ops) * num_bytes,
    )
