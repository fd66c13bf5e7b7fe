"""Cost graphs of graphs that tests make."""

from __future__ import annotations

from autopar.cost.groups import cost_graph
from autopar.cost.groups.weight_memory import UNSHARDED, Sharing
from autopar.cost.ops.op_cost import NO_FACTORS, Factors, Pricing
from autopar.cost.ops.op_stats import GraphStats
from autopar.ir.cost_graph import CostGraph, Group
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.tensor_axes import mesh_axes


def price(
    graph: Graph,
    stats: GraphStats,
    hardware: Hardware,
    batch: int,
    sharing: Sharing = UNSHARDED,
    groups: tuple[Group, ...] | None = None,
    factors: Factors = NO_FACTORS,
) -> CostGraph:
    """The cost graph of a graph whose `Pricing` a test does not need otherwise."""
    return cost_graph.price(Pricing(graph, stats, hardware, batch, mesh_axes((sharing.tp,))), sharing, groups, factors)
