"""The search: microbatches, plans that reproduce their assignment, and what it says when nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.block_chains import GIB, MACHINE, blocks, graph_of, listed, op, pipeline, plan_for, priced
from support.effort import examples

from autopar.errors import InfeasibleError, UsageError
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph, Op
from autopar.ir.hardware import Link
from autopar.ir.microbatches import microbatch_factors, microbatch_size, microbatch_sizes
from autopar.ir.plan import Plan
from autopar.schedule.simulate import one_f_one_b_seconds
from autopar.solve.result.make_plan import op_ranges
from autopar.solve.space.constraints import Constraints

# -- plans reproduce their assignment ------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, list[list[int]], list[float]]:
    """A random DAG of operations, its contraction into groups in some order that tensors follow, and times."""
    size = draw(st.integers(3, 8))
    ops: list[Op] = []
    for i in range(size):
        sources = ["x", *(o.outputs[0].name for o in ops)]
        reads = draw(st.lists(st.sampled_from(sources), min_size=1, max_size=2, unique=True))
        ops.append(op(f"m{i % 3}.op{i}", reads, [f"w_{draw(st.integers(0, 4))}"]))
    graph = graph_of(ops)
    waiting, groups = list(range(size)), []
    made = {"x", *(w.name for w in graph.weights)}
    while waiting:
        ready = [i for i in waiting if set(ops[i].reads) <= made]
        group = [draw(st.sampled_from(ready))]
        made.add(ops[group[0]].outputs[0].name)
        follower = [i for i in waiting if i not in group and set(ops[i].reads) <= made]
        if follower and draw(st.booleans()):
            group.append(follower[0])
            made.add(ops[follower[0]].outputs[0].name)
        waiting = [i for i in waiting if i not in group]
        groups.append(sorted(group))
    if len(groups) > 2 and draw(st.booleans()):
        graph = graph_of(ops, (tuple(ops[g[0]].name for g in draw(st.permutations(groups))[:2]),))
    return graph, groups, [draw(st.integers(1, 9)) for _ in groups]


@given(graphs(), st.integers(1, 3), st.integers(1, 6))
@settings(max_examples=examples(120))
def test_a_plan_survives_its_file_and_reproduces_the_assignment(
    drawn: tuple[Graph, list[list[int]], list[float]], devices: int, batch: int
) -> None:
    graph, groups, times = drawn
    constraints = Constraints(devices=devices, batch=batch)
    try:
        plan = pipeline(lambda b: priced(graph, groups, times, b), graph, MACHINE, constraints)
    except InfeasibleError as error:
        assert "can be cut into" in str(error) and len(groups) - bool(graph.colocated) < devices + 3
        return
    assert Plan.from_json(plan.to_json()) == plan
    stage_of = plan.stage_of(graph)
    cost = priced(graph, groups, times, microbatch_size(batch, plan.microbatches))
    for s, stage in enumerate(plan.stages):
        members = [g for g, group in enumerate(cost.groups[:-1]) if {stage_of[name] for name in group.ops} == {s}]
        assert stage.forward_seconds == pytest.approx(sum(cost.groups[g].forward_seconds for g in members))
        held = {r for o in graph.ops for r in o.reads if stage_of[o.name] == s and r in graph.weight}
        assert stage.params == 4 * len(held)
    assert sum(s.forward_seconds for s in plan.stages) == pytest.approx(sum(g.forward_seconds for g in cost.groups))


@given(st.lists(st.integers(0, 2), min_size=3, max_size=8).filter(lambda stages: set(stages) == {0, 1, 2}))
@settings(max_examples=examples(100))
def test_ranges_leave_the_fewest_exceptions(home: list[int]) -> None:
    graph = graph_of([op(f"op{i}", ["x"]) for i in range(len(home))])
    cost = priced(graph, [[i] for i in range(len(home))], [1.0] * len(home), 1)
    found = op_ranges(graph.ops, cost, (*home, 2))
    ends = (*found.starts[1:], len(home))
    rebuilt = [sum(i >= e for e in ends) for i in range(len(home))]
    assert [found.exceptions.get(f"op{i}", s) for i, s in enumerate(rebuilt)] == home
    fewest = min(
        sum((i >= a) + (i >= b) != s for i, s in enumerate(home)) for a, b in combinations(range(1, len(home)), 2)
    )
    assert len(found.exceptions) == fewest
    assert found.starts[0] == 0 and list(found.starts) == sorted(set(found.starts))


# -- microbatches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "microbatches"), list(product((1, 7, 8, 10, 12, 64), (1, 2, 3, 5, 6, 7))))
def test_microbatches_are_those_of_torch_chunk(batch: int, microbatches: int) -> None:
    sizes = [len(chunk) for chunk in torch.arange(batch).chunk(microbatches)]
    assert microbatch_sizes(batch, microbatches) == sizes
    assert microbatch_size(batch, microbatches) == sizes[0]
    assert [f * sizes[0] for f in microbatch_factors(batch, microbatches)] == pytest.approx(sizes)


def test_the_number_of_microbatches_is_chosen_and_the_others_are_listed() -> None:
    asked = Constraints(devices=4, batch=24, memory=30 * GIB, schedule="1f1b")
    plan = plan_for(blocks(4), asked, saved=1.0, weight=1.0)
    assert plan.microbatches == 24
    assert listed(plan) == [("12 microbatches", 184, "bubble 21 %"), ("one device", 584, "")]
    assert round(plan.prediction.step_seconds * 1e3) == 168
    assert plan.bound_by == ("compute of stage 0 (blocks.0.attn … blocks.0.mlp), 0.8 % over the mean; bubble 13 %")


def test_ragged_microbatches_are_simulated_at_their_own_size() -> None:
    whole, ragged = (plan_for(blocks(2), Constraints(devices=1, batch=b, microbatches=4)) for b in (12, 10))
    assert (whole.microbatches, ragged.microbatches) == (4, 4)
    assert whole.prediction.step_seconds == pytest.approx(12 * 12e-3 + 4e-3)
    assert ragged.prediction.step_seconds == pytest.approx(10 * 12e-3 + 4e-3)


def test_the_prediction_is_the_simulated_step_and_the_slowest_optimizer() -> None:
    free = replace(MACHINE, link=Link(0.0, 1e15))
    plan = plan_for(blocks(2), Constraints(devices=2, batch=12, microbatches=4, schedule="1f1b"), free)
    assert plan.prediction.step_seconds == pytest.approx(one_f_one_b_seconds([18e-3, 18e-3], 4) + 2e-3)
    assert plan.prediction.samples_per_second == pytest.approx(12 / 92e-3)
    assert plan.prediction.bubble_fraction == pytest.approx(1 / 5)


def test_a_number_that_chunk_cannot_make_becomes_the_one_that_runs() -> None:
    assert plan_for(blocks(2), Constraints(devices=2, batch=8, microbatches=6)).microbatches == 4
    assert plan_for(blocks(2), Constraints(devices=2, batch=8, microbatch_size=3)).microbatches == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"devices": 0}, "devices=0 must be a whole number of at least 1."),
        ({"microbatches": 9}, "microbatches=9 of a batch of 8. Use microbatches=8 or less."),
        ({"microbatches": 4, "microbatch_size": 1}, "Pass microbatches or microbatch_size, not both."),
        ({"dp": 1, "zero": 1},
         "zero=1 with dp=1: there are no replicas to share the optimizer's state. Use dp=2 or more, or leave zero "
         "out."),
        ({"schedule": "forward-only"},
         "schedule='forward-only' is unknown. It is one of 1f1b, gpipe, interleaved, interleaved-overlap, "
         "zb-h1, zb-v, searched, auto."),
        ({"schedule": "gpipe", "chunks": 2},
         "chunks=2 with schedule='gpipe', under which each rank has 1. Use schedule='interleaved', "
         "'interleaved-overlap', 'zb-v', 'searched' or 'auto', or leave chunks out."),
    ],
)  # fmt: skip
def test_contradictions_are_refused(arguments: Mapping[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Constraints(**{"devices": 4, "batch": 8, **arguments})
    assert str(caught.value) == text


def test_gpipe_keeps_every_microbatch() -> None:
    asked = Constraints(devices=2, batch=8, microbatches=8)
    peaks = [plan_for(blocks(2), replace(asked, schedule=s), saved=1.0).stages[1].peak_bytes for s in ("1f1b", "gpipe")]
    assert [round(p / GIB) for p in peaks] == [2, 16]


def test_contiguous_cuts_stand_in_for_a_program_too_large_to_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Constraints(devices=3, batch=8, microbatches=8, schedule="1f1b")
    solved = plan_for(blocks(4), asked)
    monkeypatch.setattr("autopar.solve.cuts.certify.MAX_RELAXED", 0)
    found = plan_for(blocks(4), asked)
    assert found.prediction == solved.prediction
    assert (solved.solver.status, found.solver.status) == ("optimal", "feasible")
    assert found.solver.gap > solved.solver.gap


@pytest.mark.parametrize(
    ("times", "microbatches"), [((4, 1, 3, 2, 3, 5), 3), ((4, 5, 3, 1, 5, 1), 2), ((4, 4, 4, 4, 4, 4), 6)]
)
def test_no_other_cuts_simulate_faster(times: tuple[float, ...], microbatches: int) -> None:
    """All cuts by pins, against those of the integer program."""
    graph, hardware = blocks(3), replace(MACHINE, link=Link(0.0, 1e15))
    groups = [[i] for i in range(6)]

    def step_of(pins: Mapping[str, int]) -> Plan:
        asked = Constraints(devices=3, batch=microbatches, microbatches=microbatches, pins=pins, schedule="1f1b")
        return pipeline(lambda b: priced(graph, groups, times, b), graph, hardware, asked)

    plan = step_of({})
    pinned = [
        step_of({o.name: (i >= a) + (i >= b) for i, o in enumerate(graph.ops)}) for a, b in combinations(range(1, 6), 2)
    ]
    fastest = min(p.prediction.step_seconds for p in pinned)
    assert plan.prediction.step_seconds == pytest.approx(fastest)
    assert plan.solver.status == "optimal" and plan.solver.gap <= 1e-3


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_too_many_devices() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_for(blocks(2), Constraints(devices=5, batch=8))
    assert str(caught.value) == "No plan has 5 stages: net can be cut into 4 pieces at most. Use pp=4 or less."


def test_weights_that_do_not_fit_say_how_many_devices_would_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_for(blocks(8), Constraints(devices=2, batch=8, memory=40 * GIB), weight=6.0, saved=0.5)
    assert str(caught.value) == (
        "No plan fits: stage 0 needs 56.0 GiB, rank 0 has 38.8 GiB (97 % of 40.0 GiB). Largest: weights with gradients "
        "and optimizer state (48.0 GiB), activations of 2 microbatches in flight (8.00 GiB, 2.00 GiB of them in "
        "blocks.0). The smallest memory that holds these 2 stages is 57.7 GiB per device. Use more devices, or devices "
        'with memory="58GiB" (--memory 58GiB). With 4 devices it fits.'
    )
    assert len(plan_for(blocks(8), Constraints(devices=4, batch=8, microbatches=8, memory=40 * GIB, schedule="1f1b"),
                        weight=6.0, saved=0.5).stages) == 4  # fmt: skip
    assert len(plan_for(blocks(8), Constraints(devices=2, batch=8, microbatches=8, memory=58 * GIB, schedule="1f1b"),
                        weight=6.0, saved=0.5).stages) == 2  # fmt: skip


def test_memory_can_be_what_bounds_a_plan() -> None:
    plan = plan_for(blocks(8), Constraints(devices=2, batch=8, microbatches=8, memory=20 * GIB), saved=1.5)
    assert max(plan.prediction.peak_bytes) <= 20 * GIB
    assert plan.bound_by == (
        "memory of stage 0, without whose limit the step would take 224.8 ms; then compute of stage 1 (blocks.3.attn … "
        "blocks.7.mlp), 24.5 % over the mean; bubble 26 %"
    )


def test_other_balances_are_alternatives() -> None:
    graph = blocks(4)
    times = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]

    def cost_at(batch: int) -> CostGraph:
        return priced(graph, [[i] for i in range(8)], times, batch)

    asked = Constraints(devices=2, batch=8, microbatches=8, schedule="1f1b")
    plan = pipeline(cost_at, graph, MACHINE, asked)
    assert [s.last for s in plan.stages] == ["blocks.0.attn.linear", "blocks.3.mlp.linear"]
    times_of = {a.label: a.step_seconds for a in plan.alternatives}
    assert list(times_of) == ["uniform cuts", "equal parameters", "one device"]
    uniform = pipeline(cost_at, graph, MACHINE, replace(asked, balance="uniform"))
    assert [s.last for s in uniform.stages] == ["blocks.1.mlp.linear", "blocks.3.mlp.linear"]
    assert uniform.prediction.step_seconds == pytest.approx(times_of["uniform cuts"])
    assert uniform.solver.balance == "uniform"
    assert [a.label for a in uniform.alternatives] == ["equal time", "equal FLOPs", "one device"]


def test_a_slow_link_is_what_bounds_a_plan() -> None:
    slow = replace(MACHINE, link=Link(50e-3, 1e11))
    plan = plan_for(blocks(2), Constraints(devices=2, batch=8, microbatches=8), slow)
    assert plan.bound_by == (
        "transfers behind stage 0 (blocks.0.attn … blocks.0.mlp), 94 % of its time, 89.3 % over the mean; bubble 89 %"
    )
