"""Several stages a rank in the planner: which schedule and how many, the cuts, memory, and what is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.block_chains import (
    GIB,
    MACHINE,
    Unsharded,
    blocks,
    graph_of,
    meshed,
    model_of,
    op,
    pipeline,
    plan_for,
    priced,
)
from support.effort import examples
from support.schedules import replayed

from autopar.errors import InfeasibleError, PlanError, UsageError
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Link
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import INTERLEAVED, ONE_REPLICA
from autopar.ir.table import plan_text
from autopar.schedule.generate import generate
from autopar.solve import search
from autopar.solve.cuts.evaluate import RankCost, StageCost
from autopar.solve.cuts.problem import slowest_count
from autopar.solve.cuts.step_time import Decision, Setting
from autopar.solve.space.constraints import Constraints, memory_for
from autopar.solve.space.lower_bounds import LowerBounds, pipeline_floor
from autopar.solve.space.meshes import Meshes
from autopar.solve.space.points import (
    KEPT,
    MAX_CHUNKS,
    MAX_SEARCHED_CHUNKS,
    Pipeline,
    Point,
    allowed_pipelines,
    enumerate_points,
)

FREE = replace(MACHINE, link=Link(0.0, 1e15))
names = st.sampled_from(INTERLEAVED)
AUTO = Constraints(devices=2, batch=8, microbatches=4, schedule="auto")


def peak_bytes(plan: Plan, saved: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Peak bytes of every pipeline position, from weights and saved activations, by running its actions."""
    peaks = []
    for position, row in enumerate(generate(plan.schedule, plan.placement, plan.microbatches)):
        kept: Counter[int] = Counter()
        most = 0
        for action in row:
            kept[action.chunk] += (action.kind == "F") - action.ends_backward
            most = max(most, sum(count * saved[stage] for stage, count in kept.items()))
        peaks.append(most + sum(weights[stage] for stage in plan.placement.stages(position)))
    return peaks


def groups_of(plan: Plan, graph: Graph) -> list[int]:
    """How many operations each stage has."""
    starts = [[o.name for o in graph.ops].index(stage.first) for stage in plan.stages]
    return [high - low for low, high in pairwise([*starts, len(graph.ops)])]


def test_what_is_considered() -> None:
    asked = Constraints(devices=4, batch=8, schedule="1f1b")
    two, one = Mesh(2), Mesh(1, 1, 2)
    assert allowed_pipelines(asked, two) == (Pipeline("1f1b", 1),)
    assert allowed_pipelines(replace(asked, schedule="gpipe"), two) == (Pipeline("gpipe", 1),)
    auto = replace(asked, schedule="auto")
    numbers = range(2, MAX_CHUNKS + 1)
    split = [Pipeline("searched", n, kept) for n in range(1, MAX_SEARCHED_CHUNKS + 1) for kept in KEPT]
    whole = [Pipeline("1f1b"), *(Pipeline(s, n) for n in numbers for s in INTERLEAVED)]
    assert {*allowed_pipelines(auto, two)} == {*whole, Pipeline("zb-h1"), Pipeline("zb-v", 2), *split}
    assert allowed_pipelines(auto, two)[0] == Pipeline("1f1b")  # which keeps least
    assert allowed_pipelines(replace(auto, schedule="zb-h1"), two) == (Pipeline("zb-h1"),)
    assert allowed_pipelines(replace(auto, schedule="zb-v"), two) == (Pipeline("zb-v", 2),)
    assert allowed_pipelines(replace(auto, schedule="zb-v", pins={"head": 3}), two) == (Pipeline("zb-v", 2),)
    assert allowed_pipelines(replace(auto, schedule="searched"), two) == tuple(split)
    assert allowed_pipelines(auto, one) == (Pipeline("1f1b"),)
    for name in INTERLEAVED:
        only = tuple(Pipeline(name, n) for n in (1, *numbers))
        assert allowed_pipelines(replace(auto, schedule=name), two) == only
    assert {p for p in allowed_pipelines(replace(auto, chunks=3), two) if not p.is_split} == {
        Pipeline(name, 3) for name in INTERLEAVED
    }
    assert {p.schedule for p in allowed_pipelines(replace(auto, chunks=1), two)} == {"1f1b", "zb-h1", "searched"}
    # Pins name stages, and stages are others with another number of chunks.
    assert {p.chunks for p in allowed_pipelines(replace(auto, pins={"head": 1}), two)} == {1}


def test_what_is_the_same_under_both_is_considered_once() -> None:
    graph = blocks(1)
    cost = Unsharded(lambda b: priced(graph, [[0], [1]], [1.0] * 2, b))

    def considered(microbatches: int, schedule: Any) -> set[str]:
        asked = Constraints(devices=2, batch=8, microbatches=microbatches, schedule=schedule, chunks=2)
        return {
            p.pipeline.schedule for p in enumerate_points(Setting(graph, FREE, model_of(graph), asked, cost), Mesh(2))
        }

    assert considered(4, "auto") == {"interleaved", "interleaved-overlap", "zb-v", "searched"}
    assert considered(3, "auto") == {"interleaved", "zb-v", "searched"}
    assert considered(3, "interleaved-overlap") == {"interleaved-overlap"}


def test_chunks_need_a_pipeline() -> None:
    plan = meshed(replace(AUTO, chunks=2), FREE, depth=8)
    assert (plan.mesh.pp, plan.chunks) == (2, 2)
    for alone in ({"pp": 1}, {"devices": 1}):
        with pytest.raises(UsageError, match=r"^chunks=2 with (pp=1|1 device), which is no pipeline"):
            replace(AUTO, chunks=2, **alone)
    with pytest.raises(InfeasibleError, match="no pipeline, in which alone ranks have several stages"):
        meshed(replace(AUTO, dp=2, chunks=2), FREE, depth=8)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_schedules_need_a_pipeline(name: Any) -> None:
    asked = Constraints(devices=4, batch=16)
    assert meshed(asked, FREE, depth=8).mesh.pp == 1  # the fastest, but not what is asked for below
    plan = meshed(replace(asked, schedule=name), FREE, depth=8)
    assert plan.mesh.pp > 1 and plan.schedule == name
    assert ("pp 1 × tp 1 × dp 4", f"no pipeline for {name}") in [(a.label, a.note) for a in plan.alternatives]
    for sizes, alone in (
        ({"pp": 1}, "pp=1"),
        ({"devices": 1}, "1 device"),
        ({"dp": 4}, "dp=4 on 4 devices"),
        ({"dp": 2, "tp": 2}, "tp=2 × dp=2 on 4 devices"),
    ):
        with pytest.raises(UsageError, match=f"^schedule={name!r} with {alone}, which is no pipeline. Use pp=2 or"):
            replace(asked, schedule=name, **sizes)
        assert replace(asked, schedule="gpipe", **sizes).schedule == "gpipe"
    with pytest.raises(InfeasibleError, match=rf"Leave out zero=1 \(for pp 2 .*\) or schedule='{name}' \(for pp 1 "):
        meshed(Constraints(devices=2, batch=16, zero=1, schedule=name), FREE, depth=8)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_the_count_of_the_slowest_stage_is_the_schedules(name: str) -> None:
    for pp in range(1, 5):
        for chunks in range(1, 5):
            for microbatches in range(1, 10):
                stages = [1.0] * (pp * chunks)
                step = replayed(name, pp, stages, stages, {}, [1.0] * microbatches)
                assert step == 2 * (slowest_count(microbatches, pp, chunks) + pp * chunks)


def test_auto_takes_chunks_where_transfers_are_fast_and_1f1b_where_they_are_not() -> None:
    graph = blocks(8)
    plan = plan_for(graph, replace(AUTO, batch=4, microbatches=2), FREE)
    # 16 groups of 3 ms × 2 samples: with 4 chunks of 12 ms a bubble of one chunk.
    assert (plan.schedule, plan.chunks, groups_of(plan, graph)) == ("interleaved", 4, [2] * 8)
    assert plan.prediction.step_seconds - plan.prediction.optimizer_seconds == pytest.approx((4 * 2 + 1) * 12e-3)
    assert plan.prediction.bubble_fraction == pytest.approx(1 / 9)
    times = {a.label: a.step_seconds for a in plan.alternatives}
    others = [times["interleaved, 3 chunks a rank"], times["interleaved, 2 chunks a rank"], times["1f1b"]]
    assert min(t for t in others if t) >= plan.prediction.step_seconds * (1 - 1e-9)
    # 9 groups, then 7: the second stage is done with both microbatches 12 ms earlier than with 8, the first adds 6 ms.
    assert times["1f1b"] == pytest.approx((2 + 1) * 48e-3 - 6e-3 + 8e-3)
    slow = plan_for(graph, AUTO, replace(MACHINE, link=Link(60e-3, 1e15)))
    assert (slow.schedule, slow.chunks) == ("1f1b", 1)
    assert slow.prediction.step_seconds < min(
        t for label, t, _ in ((a.label, a.step_seconds, a) for a in slow.alternatives) if t and "chunks" in label
    )


def test_auto_overlaps_where_transfers_cost_and_memory_allows() -> None:
    graph = blocks(8)
    slow = replace(MACHINE, link=Link(1e-3, 1e15))
    asked = {name: replace(AUTO, schedule=name) for name in ("1f1b", *INTERLEAVED)}
    best = {name: plan_for(graph, a, slow, saved=0.5) for name, a in asked.items()}
    steps = {name: plan.prediction.step_seconds for name, plan in best.items()}
    peaks = {name: max(plan.prediction.peak_bytes) for name, plan in best.items()}
    assert steps["interleaved-overlap"] < steps["interleaved"] < steps["1f1b"]
    assert peaks["interleaved-overlap"] > peaks["interleaved"]

    overlap = plan_for(graph, AUTO, slow, saved=0.5)
    assert (overlap.schedule, overlap.prediction.step_seconds) == ("interleaved-overlap", steps["interleaved-overlap"])
    labels = [a.label for a in overlap.alternatives]
    assert f"interleaved, {overlap.chunks} chunks a rank" in labels and "1f1b" in labels
    # Of each number of chunks the faster schedule has a row, and the chosen one is no row.
    assert sorted(label.split()[1] for label in labels if "chunks" in label) == ["2", "3", "4", "5", "6"]

    plain = plan_for(graph, replace(AUTO, memory=memory_for(peaks["interleaved"])), slow, saved=0.5)
    assert (plain.schedule, plain.prediction.step_seconds) == ("interleaved", steps["interleaved"])
    row = next(a for a in plain.alternatives if a.label == f"interleaved-overlap, {plain.chunks} chunks a rank")
    assert row.step_seconds is None and row.note.startswith("does not fit: ")
    assert plan_for(graph, replace(AUTO, memory=14 * GIB), slow, saved=0.5).schedule == "1f1b"


@pytest.mark.parametrize(("times", "batch"), [((3, 8, 1, 5, 2, 1), 4), ((5, 1, 8, 2, 2, 1), 8)])
def test_neighbours_that_simulate_faster_than_their_bound_are_taken(times: tuple[float, ...], batch: int) -> None:
    """Bounds are of the slowest stage and of the sum of all stages: by these alone, plans take 13 and 5 % longer."""
    graph, groups = blocks(3), [[i] for i in range(6)]
    asked = Constraints(devices=2, batch=batch)
    one = replace(asked, schedule="interleaved-overlap", chunks=2, microbatches=4)
    found, best = (pipeline(lambda b: priced(graph, groups, times, b), graph, MACHINE, a) for a in (asked, one))
    assert found.prediction.step_seconds <= (1 + 1e-9) * best.prediction.step_seconds


def test_neighbours_of_a_rival_that_wins_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds leave 3 microbatches only; interleaved takes 134 ms, 1F1B 138 ms before and 131 ms after final cuts.

    Of 1F1B's neighbours, 2 microbatches take 130 ms before final cuts.
    """
    explore, step_seconds = search.explore, search.step_seconds

    def explored(setting: Setting, bounds: LowerBounds, meshes: Meshes) -> search.SearchResult:
        every = explore(setting, bounds, meshes)
        by_mesh = {mesh: [c for c in found if c.point.microbatches == 3] for mesh, found in every.by_mesh.items()}
        return replace(every, by_mesh=by_mesh)

    def gained(setting: Setting, decision: Decision) -> float:
        return step_seconds(setting, decision) * (0.95 if decision.problem.chunks == 1 else 1)

    monkeypatch.setattr(search, "explore", explored)
    monkeypatch.setattr(search, "step_seconds", gained)
    monkeypatch.setattr(search, "MAX_GAIN_OF_CUTS", 1.05)
    plan = plan_for(blocks(2), Constraints(devices=2, batch=12), replace(MACHINE, link=Link(1e-2, 1e11)))
    assert (plan.schedule, plan.microbatches, round(plan.prediction.step_seconds * 1e3)) == ("1f1b", 2, 130)


def test_where_overlap_saves_nothing_less_is_kept() -> None:
    """Two stages a rank of one operation each, with free transfers: as long under both."""
    graph = blocks(2)
    one = {name: plan_for(graph, replace(AUTO, schedule=name, chunks=2), FREE, saved=0.5) for name in INTERLEAVED}
    plain, overlap = (one[name].prediction for name in INTERLEAVED)
    assert plain.step_seconds == pytest.approx(overlap.step_seconds) and max(plain.peak_bytes) < max(overlap.peak_bytes)
    assert plan_for(graph, replace(AUTO, chunks=2), FREE, saved=0.5).schedule == "interleaved"


def test_neighbours_of_overlap_with_fewer_microbatches() -> None:
    """With two of them interleaved is the same schedule; its step is shown."""
    asked = Constraints(devices=2, batch=4, schedule="auto", chunks=4)
    plan = plan_for(blocks(8), asked, replace(MACHINE, link=Link(1e-3, 1e15)))
    assert (plan.schedule, plan.microbatches) == ("interleaved-overlap", 4)
    two = plan_for(blocks(8), replace(asked, microbatches=2), replace(MACHINE, link=Link(1e-3, 1e15)))
    assert {a.label: a.step_seconds for a in plan.alternatives}["2 microbatches"] == two.prediction.step_seconds


@settings(max_examples=examples(25))
@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.sampled_from([0.0, 1e-3]), st.integers(1, 4), names)
def test_auto_is_never_slower_than_1f1b(times: list[int], latency: float, microbatches: int, name: Any) -> None:
    graph = graph_of([op(f"m{i}.op", [f"m{i - 1}.op:out" if i else "x"]) for i in range(len(times))])
    hardware = replace(MACHINE, link=Link(latency, 1e15))

    def plan_with(**asked: Any) -> Plan:
        return pipeline(
            lambda b: priced(graph, [[i] for i in range(len(times))], times, b), graph, hardware,
            Constraints(devices=2, batch=4, microbatches=microbatches, **asked),
        )  # fmt: skip

    auto = plan_with(schedule="auto")
    assert auto.prediction.step_seconds <= plan_with(chunks=1).prediction.step_seconds * (1 + 1e-9)
    # Every way to cut it for two chunks a rank: none beats the bound, and the plan is about as good as the best.
    two = plan_with(schedule=name, chunks=2)
    every = []
    for cuts in combinations(range(1, len(times)), 3):
        stage = [sum(times[low:high]) * 1e-3 for low, high in pairwise((0, *cuts, len(times)))]
        size = -(-4 // microbatches)
        sizes = [1.0] * (4 // size) + ([4 % size / size] if 4 % size else [])
        forward, backward = [t * size for t in stage], [2 * t * size for t in stage]
        hops = {hop: latency for s in range(3) for hop in ((s, s + 1), (s + 1, s))}
        every.append(replayed(name, 2, forward, backward, hops, sizes))
    found = two.prediction.step_seconds
    assert any(found == pytest.approx(step, rel=1e-4) for step in every)  # the message itself takes a little
    assert found * (1 - two.solver.gap) <= min(every) * (1 + 1e-4)
    assert found <= 1.1 * min(every)


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(1, 12), min_size=4, max_size=8),
    st.sampled_from([(2, 2), (2, 3), (3, 2)]),
    st.integers(1, 9),
    names,
)
@example([1, 6, 6, 1], (2, 2), 4, "interleaved")  # shorter stages at both ends have less of a bubble than equal ones
@example([1, 6, 6, 1], (2, 2), 4, "interleaved-overlap")
@example([1, 1, 9, 1, 1], (2, 2), 5, "interleaved")
def test_the_floor_of_chunks_is_below_every_cut(
    times: list[int], shape: tuple[int, int], microbatches: int, name: Any
) -> None:
    (pp, chunks), samples = shape, 2
    stages = pp * chunks
    if len(times) < stages:
        return
    batch = microbatches * samples - (microbatches > 1)  # the last microbatch is smaller
    sizes = [1.0] * (batch // samples) + [0.5] * (batch % samples)
    point = Point(pp, 1, ONE_REPLICA, len(sizes), Pipeline(name, chunks))
    graph = blocks(1)
    cost = Unsharded(lambda b: priced(graph, [[0], [1]], [1.0] * 2, b))
    setting = Setting(graph, FREE, model_of(graph), Constraints(devices=pp, batch=batch), cost)
    floor = pipeline_floor(setting, point, 3.0 * sum(times), 3.0 * max(times))
    for cuts in combinations(range(1, len(times)), stages - 1):
        forward = [float(sum(times[low:high])) for low, high in pairwise((0, *cuts, len(times)))]
        step = replayed(name, pp, forward, [2 * t for t in forward], {}, sizes)
        assert floor <= step * (1 + 1e-9)


def test_larger_microbatches_are_tried_where_smaller_ones_do_not_fit() -> None:
    """Seven microbatches group as 2 and 2 and 3, of which a rank holds more than of six larger ones."""
    graph = blocks(4)
    relative = {6: 1.0, 7: 1.02}  # of a sample, by the samples of its microbatch

    def plan_with(**asked: Any) -> Plan:
        def cost_at(batch: int) -> CostGraph:
            return priced(graph, [[i] for i in range(8)], [relative.get(batch, 1.6)] * 8, batch, saved=0.25)

        asked = {"devices": 2, "batch": 42, "schedule": "interleaved", "chunks": 4, **asked}
        return pipeline(cost_at, graph, FREE, Constraints(**asked))

    six, seven = plan_with(microbatches=6), plan_with(microbatches=7)
    assert seven.prediction.step_seconds < six.prediction.step_seconds
    limit = max(six.prediction.peak_bytes)
    assert limit < max(seven.prediction.peak_bytes)
    assert plan_with().microbatches == 7
    assert plan_with(memory=memory_for(limit)).microbatches == 6


@pytest.mark.parametrize(("name", "chunks"), [*product(INTERLEAVED, (2, 3)), ("zb-v", 2)])
def test_memory_is_that_of_the_schedule(name: Any, chunks: int) -> None:
    graph = blocks(6)
    asked = replace(AUTO, schedule=name, chunks=chunks, microbatches=8)
    plan = plan_for(graph, asked, FREE, saved=0.25, weight=1.0)
    counts = groups_of(plan, graph)
    ends = (0, len(counts) - 1)
    moved = [16 if s in ends else 32 for s in range(len(counts))]  # a tensor of 4 floats is received, one is sent
    saved = [n * GIB // 4 + r for n, r in zip(counts, moved)]
    expected = peak_bytes(plan, saved, [n * GIB for n in counts])
    assert list(plan.prediction.peak_bytes) == expected
    assert [sum(plan.stages[s].peak_bytes for s in plan.placement.stages(p)) for p in range(2)] == expected


def test_chunks_are_as_many_as_fit() -> None:
    graph = blocks(8)
    several = replace(AUTO, schedule="interleaved")
    free = plan_for(graph, several, FREE, saved=0.5)
    assert free.chunks == 6
    peaks, steps = {}, {}
    for chunks in (1, 2, 3, 4):
        plan = plan_for(graph, replace(several, chunks=chunks), FREE, saved=0.5)
        peaks[chunks], steps[chunks] = max(plan.prediction.peak_bytes), plan.prediction.step_seconds
    assert peaks[1] < peaks[4] and steps[4] < steps[1]
    capped = plan_for(graph, replace(several, memory=memory_for(peaks[1])), FREE, saved=0.5)
    assert max(capped.prediction.peak_bytes) <= peaks[1]
    assert steps[4] < capped.prediction.step_seconds < steps[1]
    remedies = {'Use more devices, or schedule="1f1b", or': several}
    remedies['Use more devices, or schedule="interleaved", or schedule="1f1b", or'] = replace(
        AUTO, schedule="interleaved-overlap"
    )
    for remedy, asked in remedies.items():
        with pytest.raises(InfeasibleError) as caught:
            plan_for(graph, replace(asked, chunks=4, memory=2 * GIB), FREE, saved=0.5)
        assert "No plan fits: stages 0 and 2 and 4 and 6 need" in str(caught.value)
        assert remedy in str(caught.value)


def test_chunks_recompute_where_they_do_not_fit_otherwise() -> None:
    graph = blocks(8)
    asked = replace(AUTO, schedule="interleaved", chunks=2)
    groups = [[i] for i in range(len(graph.ops))]

    def plan_with(memory_bytes: int | None) -> Plan:
        def cost_at(batch: int) -> Any:
            cost = priced(graph, groups, [1.0] * len(groups), batch, saved=0.5)
            kept = tuple(replace(g, kept_bytes=g.saved_bytes // 8) for g in cost.groups)
            return replace(cost, groups=kept)

        return pipeline(cost_at, graph, FREE, replace(asked, recompute="auto", memory=memory_bytes))

    whole = plan_with(None)
    assert {s.recompute for s in whole.stages} == {"none"}
    limit = int(0.8 * max(whole.prediction.peak_bytes))
    tight = plan_with(limit)
    assert max(tight.prediction.peak_bytes) <= limit
    assert {s.recompute for s in tight.stages} == {"none", "all"}
    assert tight.prediction.step_seconds > whole.prediction.step_seconds


def test_a_tensor_that_stays_on_its_rank_is_not_sent_and_a_shared_weight_is_held_once() -> None:
    """Stage 0 feeds stage 2, on the same rank, straight; both read one weight."""
    ops = [op("a", ["x"], ["w_0"])]
    ops += [op("b", ["a:out"], ["w_1"]), op("c", ["b:out", "a:out"], ["w_0"]), op("d", ["c:out"], ["w_2"])]
    asked = replace(AUTO, schedule="interleaved", chunks=2, pins={"a": 0, "b": 1, "c": 2, "d": 3})
    plan = plan_for(graph_of(ops), asked, FREE, weight=1.0)
    assert [s.ranks for s in plan.stages] == [(0,), (1,), (0,), (1,)]
    assert [s.send_bytes for s in plan.stages] == [32, 32, 32, 0]  # of 2 samples; a's to c would be 32 more
    weights = [round(b / GIB) for b in plan.prediction.peak_bytes]
    assert weights == [1, 2]
    assert plan.prediction.optimizer_seconds == pytest.approx(2e-3)


def test_the_predicted_bubble_of_uneven_numbers() -> None:
    """Seven microbatches on two ranks; one of them ragged."""
    graph = blocks(8)
    plan = plan_for(graph, replace(AUTO, batch=13, microbatches=7, schedule="interleaved", chunks=2), FREE)
    assert plan.microbatches == 7
    step = replayed("interleaved", 2, [8e-3] * 4, [16e-3] * 4, {}, [1.0] * 6 + [0.5])
    assert plan.prediction.step_seconds - plan.prediction.optimizer_seconds <= step * (1 + 1e-6)
    assert plan.prediction.bubble_fraction == pytest.approx(
        1 - 6.5 * 48e-3 / (plan.prediction.step_seconds - plan.prediction.optimizer_seconds), abs=1e-6
    )


def test_with_tensor_parallelism_and_replicas() -> None:
    plan = meshed(Constraints(devices=8, batch=16, pp=2, tp=2, dp=2, schedule="interleaved", chunks=2), FREE, depth=8)
    assert (str(plan.mesh), plan.chunks, len(plan.stages)) == ("pp 2 × tp 2 × dp 2", 2, 4)
    assert [s.ranks for s in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
    assert len(plan.prediction.peak_bytes) == 8
    assert plan.solver.method == "shardings then cuts" and 0 <= plan.solver.gap < 1
    plan.validate()


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (
            {"schedule": "1f1b", "chunks": 2},
            UsageError,
            "chunks=2 with schedule='1f1b', under which each rank has 1.",
        ),
        ({"schedule": "interleaved", "chunks": 0}, UsageError, "chunks=0 must be a whole number of at least 1."),
        (
            {"schedule": "interleaved", "chunks": 5},
            InfeasibleError,
            "No plan has 10 stages: net can be cut into 8 pieces at most. Use chunks=4 or less.",
        ),
        (
            {"schedule": "interleaved", "chunks": 10_000, "pp": 2},
            InfeasibleError,
            "No plan has 20000 stages: net can be cut into 8 pieces at most. Use chunks=4 or less.",
        ),
        (
            {"schedule": "interleaved", "chunks": 2, "pins": {"blocks.0": 4}},
            UsageError,
            "blocks.0 is pinned to stage 4, stages are 0 to 3.",
        ),
    ],
)
def test_what_cannot_be_planned(asked: Mapping[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        plan_for(blocks(4), Constraints(**{"devices": 2, "batch": 8, **asked}))
    assert str(caught.value).startswith(text)


def interleaved_plan() -> Plan:
    return plan_for(blocks(4), replace(AUTO, schedule="interleaved", chunks=2), FREE, saved=0.5, weight=1.0)


def test_a_plan_with_chunks_survives_its_file_and_edits_are_refused() -> None:
    plan = interleaved_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert "interleaved, 2 chunks a rank, 4 microbatches" in plan.decision
    overlap = replace(plan, schedule="interleaved-overlap")
    assert Plan.from_json(overlap.to_json()) == overlap
    assert "interleaved-overlap, 2 chunks a rank, 4 microbatches" in overlap.decision
    for changes, text in (
        ({"schedule": "1f1b"}, "field chunks: is 2; under 1f1b each rank has 1. 2 are for interleaved, inter"),
        ({"chunks": 1}, "field stages: has 4 entries, mesh.pp × chunks asks for 2."),
        ({"chunks": 0}, "field chunks: is 0, must be at least 1."),
        ({"stages": plan.stages[:3]}, "field stages: has 3 entries, mesh.pp × chunks asks for 4."),
        (
            {"stages": (*plan.stages[:3], replace(plan.stages[3], ranks=(0,)))},
            "field stages.3.ranks: is [0], must be 1",
        ),
    ):
        with pytest.raises(PlanError) as caught:
            Plan.from_json(replace(plan, **changes).to_json())
        assert text in str(caught.value)


def test_the_printed_plan_names_chunks() -> None:
    lines = plan_text(interleaved_plan()).splitlines()
    assert "schedule interleaved, 2 chunks a rank, fp32, bubble" in next(line for line in lines if "mesh" in line)
    head = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    assert lines[head].split()[:5] == ["stage", "ranks", "chunk", "from", "…"]
    rows = [line.split()[:3] for line in lines[head + 2 :] if line.strip()[:1].isdigit()]
    assert rows == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]]
    memory = next(line for line in lines if line.startswith("memory"))
    assert memory.startswith("memory      rank 0 is the fullest: ") and memory.endswith("all of its chunks together")
    assert any(line.startswith("solver      HiGHS: ") and "certified gap" in line for line in lines)


def test_reductions_hide_where_gradients_of_weights_come() -> None:
    """Under the whole last backward, or under its second half."""
    numbers: dict[str, Any] = dict.fromkeys((field.name for field in fields(StageCost)), 0)
    stage = replace(StageCost(**numbers), backward_seconds=3.0, wgrad_seconds=1.0, reduce_seconds=2.0, num_buckets=8.0)
    assert RankCost((stage,)).exposed_seconds == 0.25  # a bucket
    assert RankCost((replace(stage, is_split=True),)).exposed_seconds == 1.0
