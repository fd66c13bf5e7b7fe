"""The bound of a plan with shardings, against brute force over all shardings and cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cut_problems import contiguous
from support.effort import examples
from support.strategy_graphs import RANKS, SAVED, strategy_graphs, vit_strategies

from autopar.api.planning.costs import PlanCosts
from autopar.api.planning.refine import refine
from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.hardware.load import load_hardware
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph, Op, Ref, Value
from autopar.ir.hardware import Hardware, Link
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import ModelInfo, Replicas
from autopar.ir.strategies import StrategyGraph
from autopar.ir.tensor_axes import TensorAxes, mesh_axes, num_ranks
from autopar.solve.cuts.problem import CutProblem, Priced
from autopar.solve.cuts.step_time import Setting, step_time
from autopar.solve.search import search
from autopar.solve.shardings.cost import resharding_cost, value_edges
from autopar.solve.shardings.solve import Shardings, pareto, solve_shardings, work_bound_seconds
from autopar.solve.space.constraints import Constraints, boundary_links

MACHINE = replace(load_hardware("h200-nvlink"), link=Link(1e-3, 1e3))


@dataclass(frozen=True)
class ChoicePrices:
    """The prices of a choice graph, the same at any size of a microbatch; labels say which choice a group runs.

    A conversion counts for the first group that needs it, which is exact where every value has one reader.
    """

    choice_graph: StrategyGraph
    graph: Graph
    hardware: Hardware = MACHINE
    message_bytes: int = 8  # of each value that is not split
    factors: tuple[()] = ()

    def outer(self, axes: TensorAxes, size: int) -> SimpleNamespace:
        return SimpleNamespace(graph=self.graph)

    def strategy_graph(self, axes: TensorAxes, size: int) -> StrategyGraph:
        return self.choice_graph

    def sharing(self, axes: TensorAxes, replicas: Replicas) -> Sharing:
        return Sharing(num_ranks(axes), replicas)

    def keeping(self, priced: Priced, axes: TensorAxes, replicas: Replicas, size: int, kept: frozenset[str]) -> Priced:
        raise AssertionError("there are no replicas")

    def floor_seconds(self, axes: TensorAxes, size: int) -> float:
        return 0.0

    def priced(
        self, axes: TensorAxes, replicas: Replicas, size: int, microbatches: int, memory_level: int
    ) -> Priced | None:
        if memory_level:
            return None
        return self.priced_strategies(
            solve_shardings(self.choice_graph, microbatches).strategy_index, axes, replicas, size
        )

    def sharding(self, axes: TensorAxes, size: int, microbatches: int, memory_level: int) -> Shardings | None:
        return [*pareto(self.choice_graph, microbatches), None][memory_level]

    def bound_seconds(self, axes: TensorAxes, size: int) -> float:
        return work_bound_seconds(self.choice_graph)

    proven_seconds = bound_seconds

    def priced_strategies(self, picks: tuple[int, ...], axes: TensorAxes, replicas: Replicas, size: int) -> Priced:
        groups = self.choice_graph.groups
        chosen = [group.strategies[k] for group, k in zip(groups, picks)]
        seconds, flows = [c.seconds for c in chosen], []
        for wire in value_edges(self.choice_graph):
            made = wire.layouts[picks[wire.producer]]
            first = {r.layouts[picks[r.group]]: r.group for r in reversed(wire.consumers)}
            for layout, reader in first.items():
                seconds[reader] += resharding_cost(self.choice_graph, wire.value, made, layout).seconds
            num_bytes = self.message_bytes // RANKS ** len(made.splits)
            flows.append(TensorEdge(wire.value, wire.producer, tuple(r.group for r in wire.consumers), num_bytes, True))
        names = [(group.name,) if number < len(groups) - 1 else () for number, group in enumerate(groups)]
        cost = CostGraph(
            "net",
            size,
            tuple(Group(g.name, own, "", t, 0.0) for g, own, t in zip(groups, names, seconds)),
            tuple(flows),
            tuple(ResidentTensor(g.name, 0, (i,), 0, c.step_seconds) for i, (g, c) in enumerate(zip(groups, chosen))),
        )
        labels = {group.name: str(k) for group, k in zip(groups[:-1], picks)}
        return Priced(cost, strategies=labels, strategy_index=picks)


def graph_of(choices: StrategyGraph) -> Graph:
    """A graph with an operation for every group but the loss."""
    ops = []
    for group in choices.groups[:-1]:
        made = tuple(Value(name, (4,), "float32", (1,), True) for name in group.makes)
        ops.append(Op(group.name, "aten.linear.default", (Ref("x"), *map(Ref, group.reads)), (), made, ""))
    ends = tuple(map(Ref, choices.groups[-1].reads))
    inputs = (Value("x", (4,), "float32", (1,)),)
    return Graph("net", "train", 1, inputs, (), tuple(ops), ends, (Ref("x"),), None, None)


def planned(choices: StrategyGraph, asked: Constraints) -> tuple[Plan, Graph]:
    graph = graph_of(choices)
    costs = ChoicePrices(choices, graph)
    model = ModelInfo("net", graph.fingerprint, 0, ())
    return search(costs, graph, MACHINE, asked, model, partial(refine, cast(PlanCosts, costs))), graph


def allowed(choices: StrategyGraph) -> Iterator[tuple[int, ...]]:
    """Strategy indices, [groups], under which shared weights are sharded alike; equal kinds may differ."""
    groups = choices.groups
    for picks in product(*(range(len(g.strategies)) for g in groups)):
        stored: dict[str, set[str]] = {}
        for g, k in zip(groups, picks):
            for weight, layout in zip(g.weights, g.strategies[k].weight_layouts):
                stored.setdefault(weight, set()).add(str(layout))
        if all(len(layouts) == 1 for layouts in stored.values()):
            yield picks


def least_seconds(costs: ChoicePrices, asked: Constraints) -> float | None:
    """Least simulated step over all shardings and all contiguous cuts."""
    assert asked.pp and asked.microbatches
    names = [group.name for group in costs.choice_graph.groups]
    values = []
    for picks in allowed(costs.choice_graph):
        problem = CutProblem(
            costs.priced_strategies(picks, mesh_axes((RANKS,)), Replicas(), 1).cost, asked.pp, asked.microbatches, None,
            (1,) * asked.pp, boundary_links(MACHINE, Mesh(asked.pp, RANKS)),
            pins={names.index(n): s for n, s in asked.pins.items()}, tp=RANKS,
        )  # fmt: skip
        setting = Setting(costs.graph, MACHINE, ModelInfo("net", "", 0, ()), asked, costs)
        values += [step_time(setting, problem, stage_of).seconds for stage_of in contiguous(problem)]
    return min(values, default=None)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Constraints, StrategyGraph]:
    choices = draw(strategy_graphs())
    real = len(choices.groups) - 1
    stages, m = draw(st.integers(1, min(3, real))), draw(st.integers(1, 4))
    pins = {draw(st.integers(0, real - 1)): draw(st.integers(0, stages - 1))} if draw(st.integers(0, 3)) == 0 else {}
    names = {choices.groups[g].name: s for g, s in pins.items()}
    return Constraints(
        RANKS * stages, batch=m, pp=stages, tp=RANKS, dp=1, microbatches=m, pins=names, schedule="1f1b"
    ), choices


@given(questions())
@settings(max_examples=examples(120))
def test_no_sharding_and_no_cuts_are_below_the_bound(question: tuple[Constraints, StrategyGraph]) -> None:
    asked, choices = question
    best = least_seconds(ChoicePrices(choices, graph_of(choices)), asked)
    assume(best is not None)
    assert best is not None
    plan, _ = planned(choices, asked)
    step, solver = plan.prediction.step_seconds, plan.solver
    assert solver.method == ("shardings then cuts" if asked.pp != 1 else "shardings")
    assert step * (1 - solver.gap) <= best * (1 + 1e-6)
    assert (solver.status == "optimal") == (solver.gap < 1.01e-3)
    if solver.status == "optimal":
        assert step == pytest.approx(best, rel=1.1e-3)


@pytest.mark.full
def test_a_vit_is_bounded_by_its_shardings() -> None:
    choices = vit_strategies(60)
    for stages in (1, 8):
        asked = Constraints(RANKS * stages, batch=32, pp=stages, tp=RANKS, dp=1, microbatches=32, schedule="1f1b")
        fast = replace(MACHINE, link=Link(1e-6, 1e12))
        graph = graph_of(choices)
        costs = ChoicePrices(choices, graph, fast, SAVED)
        model = ModelInfo("net", graph.fingerprint, 0, ())
        plan = search(costs, graph, fast, asked, model, partial(refine, cast(PlanCosts, costs)))
        assert 0 <= plan.solver.gap <= (1e-3 if stages == 1 else 0.12)
