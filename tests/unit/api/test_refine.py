"""The joint model inside the search: the plan against brute force over choices and cuts, and its certificate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.joint_problems import brute_force, step_seconds
from support.strategy_graphs import RANKS, strategy_graphs, vit_strategies

from autopar.api.planning.costs import PlanCosts
from autopar.api.planning.refine import refine
from autopar.cost.hardware.load import load_hardware
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph, Op, Ref, Value
from autopar.ir.hardware import Hardware, Link
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import ModelInfo, ZeroStage
from autopar.ir.strategies import StrategyGraph
from autopar.solve.cuts.problem import Priced
from autopar.solve.joint.problem import JointProblem
from autopar.solve.search import search
from autopar.solve.shardings.cost import resharding_cost, value_edges
from autopar.solve.shardings.solve import solve_shardings
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

    def strategy_graph(self, tp: int, size: int) -> StrategyGraph:
        return self.choice_graph

    def floor_seconds(self, tp: int, size: int) -> float:
        return 0.0

    def priced(
        self, tp: int, dp: int, zero: ZeroStage, size: int, microbatches: int, memory_level: int
    ) -> Priced | None:
        if memory_level:
            return None
        return self.priced_strategies(
            solve_shardings(self.choice_graph, microbatches).strategy_index, tp, dp, zero, size
        )

    def bound_seconds(self, tp: int, size: int) -> float:
        return solve_shardings(self.choice_graph, 1).bound_seconds

    def priced_strategies(self, picks: tuple[int, ...], tp: int, dp: int, zero: ZeroStage, size: int) -> Priced:
        groups, value_bytes = self.choice_graph.groups, self.choice_graph.value_bytes
        chosen = [group.strategies[k] for group, k in zip(groups, picks)]
        seconds, flows = [c.seconds for c in chosen], []
        for wire in value_edges(self.choice_graph):
            made = wire.layouts[picks[wire.producer]]
            first = {r.layouts[picks[r.group]]: r.group for r in reversed(wire.consumers)}
            for layout, reader in first.items():
                seconds[reader] += resharding_cost(self.choice_graph, wire.value, made, layout).seconds
            num_bytes = value_bytes[wire.value] // RANKS ** len(made.splits)
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


def question(choices: StrategyGraph, asked: Constraints, pins: dict[int, int]) -> JointProblem:
    assert asked.pp and asked.microbatches
    return JointProblem(
        choices, asked.pp, asked.microbatches, None, (1,) * asked.pp, boundary_links(MACHINE, Mesh(asked.pp, RANKS)),
        RANKS, pins,
    )  # fmt: skip


def cost_of(plan: Plan, graph: Graph, problem: JointProblem) -> float:
    """Step time of the plan by the joint model's formula."""
    stage_of = plan.stage_of(graph)
    picks = (*(int(plan.strategies[op.name]) for op in graph.ops), 0)
    return step_seconds(problem, picks, (*(stage_of[op.name] for op in graph.ops), problem.stages - 1))


@st.composite
def questions(draw: st.DrawFn, microbatches: st.SearchStrategy[int]) -> tuple[Constraints, JointProblem]:
    choices = draw(strategy_graphs())
    real = len(choices.groups) - 1
    stages, m = draw(st.integers(1, min(3, real))), draw(microbatches)
    pins = {draw(st.integers(0, real - 1)): draw(st.integers(0, stages - 1))} if draw(st.integers(0, 3)) == 0 else {}
    names = {choices.groups[g].name: s for g, s in pins.items()}
    asked = Constraints(RANKS * stages, batch=m, pp=stages, tp=RANKS, dp=1, microbatches=m, pins=names)
    return asked, question(choices, asked, pins)


@given(questions(st.integers(1, 4)))
@settings(max_examples=examples(60), deadline=None)
def test_the_certificate_is_the_distance_from_the_optimum(
    asked: tuple[Constraints, JointProblem],
) -> None:
    constraints, problem = asked
    best = brute_force(problem)
    assume(best is not None)
    assert best is not None
    plan, graph = planned(problem.graph, constraints)
    assume(not plan.solver.moved_share)
    cost = cost_of(plan, graph, problem)
    assert plan.solver.method == ("joint" if problem.stages > 1 else "shardings")
    assert plan.solver.gap == pytest.approx((cost - best) / cost, abs=1.1e-3)
    assert (plan.solver.status == "optimal") == (plan.solver.gap < 1.01e-3)


@given(questions(st.just(1)))
@settings(max_examples=examples(60), deadline=None)
def test_the_plan_is_the_best_over_choices_and_cuts(asked: tuple[Constraints, JointProblem]) -> None:
    """With one microbatch the formula is the simulated step, but where messages overlap and cuts were moved therefore;
    each value has one reader, so that prices are exact."""
    constraints, problem = asked
    assume(all(len(wire.consumers) == 1 for wire in value_edges(problem.graph)))
    best = brute_force(problem)
    assume(best is not None)
    plan, graph = planned(problem.graph, constraints)
    assume(not plan.solver.moved_share)
    assert cost_of(plan, graph, problem) == pytest.approx(best, rel=1.1e-3)


@pytest.mark.full
def test_a_model_too_large_for_the_joint_model_is_bounded_by_its_shardings() -> None:
    choices = vit_strategies(60)
    for stages, method in ((1, "shardings"), (8, "shardings then cuts")):
        asked = Constraints(RANKS * stages, batch=32, pp=stages, tp=RANKS, dp=1, microbatches=32)
        fast = replace(MACHINE, link=Link(1e-6, 1e12))
        graph = graph_of(choices)
        costs = ChoicePrices(choices, graph, fast)
        model = ModelInfo("net", graph.fingerprint, 0, ())
        plan = search(costs, graph, fast, asked, model, partial(refine, cast(PlanCosts, costs)))
        assert plan.solver.method == method
        assert 0 <= plan.solver.gap <= (1e-3 if stages == 1 else 0.05)
