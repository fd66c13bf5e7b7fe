"""Collectives beside the products of linear layers: what these hide of them takes no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.cost.ops.op_cost import OpCost, Pricing
from autopar.cost.ops.op_stats import Facts
from autopar.ir.graph import Op, refs
from autopar.ir.strategies import ReshardingCost
from autopar.sharding.fuse_linear import find_fusable


@dataclass(frozen=True)
class OverlapWindow:
    """Shares of a layer's product forward, and of its two products backward, beside which its collective travels."""

    forward: float
    backward: float


# By the operator that is both, and the number of ranks: rows of one rank are computed while another's travel, and the
# weight's gradient while that of what the layer reads is summed.
OVERLAP_WINDOWS: Mapping[str, Callable[[int], OverlapWindow]] = {
    "gathered_linear": lambda ranks: OverlapWindow(0.0, 1 / 2),
    "summed_linear": lambda ranks: OverlapWindow(0.0, 1 / 2),
    "gathered_rows_linear": lambda ranks: OverlapWindow(1 / ranks, 1 / 2),
    "scattered_rows_linear": lambda ranks: OverlapWindow(1 - 1 / ranks, 1 / ranks / 2),
}


def with_exposed_collectives(pricing: Pricing, costs: Mapping[str, OpCost]) -> Mapping[str, OpCost]:
    """The same costs with what is left of collectives that codegen joins with a linear layer.

    Args:
        pricing: of what a rank runs.
    """
    found = dict(costs)
    for pair in find_fusable(pricing.graph.ops, frozenset(refs(pricing.graph.outputs))):
        moved = costs[pair.collective.name]
        layer = products_of(pair.layer, costs[pair.layer.name], pricing.facts)
        left = exposed_seconds(
            pair.operator, layer, ReshardingCost(moved.forward_seconds, moved.backward_seconds), pricing
        )
        found[pair.collective.name] = replace(
            moved, forward_seconds=left.forward_seconds, backward_seconds=left.backward_seconds
        )
    return found


def products_of(layer: Op, cost: OpCost, facts: Facts) -> ReshardingCost:
    """Seconds of a layer's product forward, and of its two backward: none where there is one, which hides nothing."""
    trains_both = {0, 1} <= {*facts.ops[layer.name].gradients}  # of what it reads and of its weight
    return ReshardingCost(cost.forward_seconds, cost.backward_seconds - cost.passes_seconds if trains_both else 0.0)


def exposed_seconds(operator: str, layer: ReshardingCost, moved: ReshardingCost, pricing: Pricing) -> ReshardingCost:
    """What of a collective's seconds a layer does not hide.

    Args:
        operator: that is both.
        layer: as `products_of` says.
        moved: the collective's.
    """
    beside, share = OVERLAP_WINDOWS[operator](pricing.ranks), pricing.hardware.overlap_efficiency
    return ReshardingCost(
        moved.forward_seconds - share * min(moved.forward_seconds, beside.forward * layer.forward_seconds),
        moved.backward_seconds - share * min(moved.backward_seconds, beside.backward * layer.backward_seconds),
    )
