"""Merges groups that must share a stage, so that later modules need not know about `CostGraph.colocated`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import networkx as nx

from autopar.errors import UsageError
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.solve.cuts.problem import CutProblem


@dataclass(frozen=True)
class Merged:
    """The problem on merged groups; ``unit_of[g]`` is the merged group that holds group g of the original."""

    problem: CutProblem
    unit_of: tuple[int, ...]

    def expand(self, stage_of: Sequence[int]) -> tuple[int, ...]:
        """The stage of every original group."""
        return tuple(stage_of[u] for u in self.unit_of)

    def units(self, stage_of: Sequence[int]) -> tuple[int, ...]:
        """The stage of every merged group; inverse of `expand`."""
        of_unit = dict(zip(self.unit_of, stage_of, strict=True))
        return tuple(of_unit[u] for u in range(len(of_unit)))


# Orders of the units, all topological: as traced, or by the longest path of work from the inputs, or to the loss.
Order = Literal["traced", "earliest", "latest"]
ORDERS: tuple[Order, ...] = get_args(Order)


def in_every_order(problem: CutProblem) -> list[Merged]:
    """The problem on merged groups in each order that differs from the others."""
    found: dict[tuple[int, ...], Merged] = {}
    for order in ORDERS:
        merged = merge(problem, order)
        found.setdefault(merged.unit_of, merged)
    return list(found.values())


def merge(problem: CutProblem, order: Order = "traced") -> Merged:
    """The problem with each set of colocated groups merged into one.

    Groups on a path between two members have to join them, or stages would wait for each other. Units are the strongly
    connected components of the edges, with each set of `colocated` added as a cycle.

    Raises:
        UsageError: two groups of one unit are pinned to different stages.
    """
    cost = problem.cost
    key = ("merged", order, *sorted(problem.pins.items()))
    merged, unit_of = cost.remember(key, lambda: merged_costs(cost, order, problem.pins))
    pins: dict[int, int] = {}
    by: dict[int, int] = {}
    for g, s in sorted(problem.pins.items()):
        u = unit_of[g]
        if pins.setdefault(u, s) != s:
            raise UsageError(
                f"Pins contradict each other: {cost.groups[by[u]].name} is pinned to stage {pins[u]} and "
                f"{cost.groups[g].name} to stage {s}, but they update the same state and must share a stage. "
                "Pin both to one stage."
            )
        by[u] = g
    return Merged(replace(problem, cost=merged, pins=pins), unit_of)


def merged_costs(cost: CostGraph, order: Order, pins: Mapping[int, int]) -> tuple[CostGraph, tuple[int, ...]]:
    """The cost graph of the units, and the unit of each group."""
    units = _units(cost, order, pins)
    unit_of = [0] * len(cost.groups)
    for u, members in enumerate(units):
        for g in members:
            unit_of[g] = u
    if unit_of == [*range(len(cost.groups))]:
        return cost, tuple(unit_of)
    merged = CostGraph(
        model=cost.model,
        batch=cost.batch,
        groups=tuple(_merged_group(cost, members) for members in units),
        edges=tuple(f for flow in cost.edges if (f := _merged_flow(flow, unit_of)) is not None),
        weights=tuple(_merged_holding(h, unit_of) for h in cost.weights),
        saved=tuple(_merged_holding(h, unit_of) for h in cost.saved),
        recomputed_below=cost.recomputed_below,
    )
    return merged, tuple(unit_of)


def _units(cost: CostGraph, order: Order, pins: Mapping[int, int]) -> list[list[int]]:
    """Sets of groups that share a stage, in an order that every flow follows, by the stages that pins allow first."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(cost.groups)))
    graph.add_edges_from((f.producer, c) for f in cost.edges for c in f.consumers)
    for names in cost.colocated:
        nx.add_cycle(graph, names)
    units = nx.condensation(graph)
    members = {u: sorted(units.nodes[u]["members"]) for u in units}
    seconds = {u: sum(cost.groups[g].seconds for g in members[u]) for u in units}
    back = units.reverse()
    key: dict[int, float] = {u: members[u][0] for u in units}
    if order == "earliest":
        key = longest_paths(units, seconds)
    elif order == "latest":
        key = {u: -path for u, path in longest_paths(back, seconds).items()}
    pinned = {u: [pins[g] for g in members[u] if g in pins] for u in units}
    first = {u: max((s for v in (u, *nx.ancestors(units, u)) for s in pinned[v]), default=0) for u in units if pins}
    last = {u: min((s for v in (u, *nx.ancestors(back, u)) for s in pinned[v]), default=math.inf) for u in first}
    end = units.graph["mapping"][cost.loss]
    return [
        members[u]
        for u in nx.lexicographical_topological_sort(
            units, key=lambda u: (u == end, first.get(u, 0), last.get(u, 0), key[u], members[u][0])
        )
    ]


def longest_paths(graph: nx.DiGraph, seconds: Mapping[int, float]) -> dict[int, float]:
    """The longest path to the end of each node."""
    found: dict[int, float] = {}
    for u in nx.topological_sort(graph):
        found[u] = seconds[u] + max((found[v] for v in graph.predecessors(u)), default=0.0)
    return found


def _merged_group(cost: CostGraph, members: Sequence[int]) -> Group:
    groups = [cost.groups[g] for g in members]
    if len(groups) == 1:
        return groups[0]
    return Group(
        name=groups[0].name,
        ops=tuple(op for g in groups for op in g.ops),
        module=groups[0].module,
        forward_seconds=sum(g.forward_seconds for g in groups),
        backward_seconds=sum(g.backward_seconds for g in groups),
        flops=sum(g.flops for g in groups),
        saved_bytes=sum(g.saved_bytes for g in groups),
        transient_bytes=max(g.transient_bytes for g in groups),
        kept_bytes=sum(g.kept_bytes for g in groups),
        segment_bytes=max(g.segment_bytes for g in groups),
        forward_collective_seconds=sum(g.forward_collective_seconds for g in groups),
        backward_collective_seconds=sum(g.backward_collective_seconds for g in groups),
        symmetric_buffer_bytes=max(g.symmetric_buffer_bytes for g in groups),
        workspace_bytes=max(g.workspace_bytes for g in groups),
        segments=tuple(dict.fromkeys(own for g in groups for own in g.segments)),
        recompute_seconds=sum(g.recompute_seconds for g in groups),
        forward_exchange_seconds=sum(g.forward_exchange_seconds for g in groups),
        backward_exchange_seconds=sum(g.backward_exchange_seconds for g in groups),
        wgrad_seconds=sum(g.wgrad_seconds for g in groups),
        deferred_bytes=sum(g.deferred_bytes for g in groups),
    )


def _merged_flow(flow: TensorEdge, unit_of: Sequence[int]) -> TensorEdge | None:
    """The flow between units, or None if it stays within one."""
    producer = unit_of[flow.producer]
    consumers = sorted({unit_of[c] for c in flow.consumers} - {producer})
    saved_by = tuple(sorted({unit_of[g] for g in flow.saved_by if unit_of[g] >= producer}))
    if not consumers:
        return None
    return replace(flow, producer=producer, consumers=tuple(consumers), saved_by=saved_by, activation=None)


def _merged_holding(holding: ResidentTensor, unit_of: Sequence[int]) -> ResidentTensor:
    # The first one stays first, under every order.
    return replace(holding, groups=tuple(dict.fromkeys(unit_of[g] for g in holding.groups)), activation=None)
