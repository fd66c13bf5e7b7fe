"""The search over meshes: which wins, what the others lose on, bounds, and meshes that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, cast
from unittest.mock import Mock

import pytest
from support.block_chains import GIB, MACHINE, Splittable, blocks, listed, meshed, model_of, plan_for, priced

from autopar.errors import HardwareError, InfeasibleError, UsageError
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.hardware import Link
from autopar.ir.mesh import Mesh
from autopar.ir.network import Network, Port
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Replicas, ZeroStage
from autopar.ir.strategies import ShardingStrategy, StrategyGraph, StrategyGroup
from autopar.solve.cuts import local_search
from autopar.solve.cuts.dynamic_programme import contiguous_cuts
from autopar.solve.cuts.evaluate import RankCost, StageCost, stage_costs
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.cuts.step_time import Decision, Setting, messages, pipeline_seconds, step_time
from autopar.solve.search import Refine, Refined
from autopar.solve.space import candidates
from autopar.solve.space.candidates import cut_and_evaluate, evaluate_cuts, improve, make_cut_problem
from autopar.solve.space.constraints import Constraints, boundary_links
from autopar.solve.space.explore import explore, fastest_nearby
from autopar.solve.space.lower_bounds import LowerBounds, fastest_slowest_stage, shardings_at
from autopar.solve.space.meshes import possible_meshes, why_not
from autopar.solve.space.points import (
    enumerate_points,
    least_memory_points,
    neighbours,
    points_with_other_schedules,
)


def test_the_mesh_is_chosen_and_every_other_is_listed_with_what_it_loses_on() -> None:
    plan = meshed(Constraints(devices=4, batch=32, schedule="1f1b"), reduce=40e-3)
    assert (str(plan.mesh), plan.microbatches) == ("pp 1 × tp 4 × dp 1", 1)
    assert listed(plan) == [
        ("pp 4 × tp 1 × dp 1, m 32", 217, "bubble 11 %"),
        ("pp 2 × tp 2 × dp 1, m 32", 223, "bubble 4 %"),
        ("pp 2 × tp 1 × dp 2, m 16, ZeRO-1", 228, "reduction 20.0 ms exposed, bubble 7 %"),
        ("pp 1 × tp 2 × dp 2, m 1, ZeRO-1", 233, "reduction 20.0 ms exposed"),
        ("pp 1 × tp 1 × dp 4, m 1, ZeRO-1", 234, "reduction 40.0 ms exposed"),
        ("2 microbatches", 213, ""),
        ("one device", 776, ""),
    ]
    assert plan.bound_by == "compute of stage 0 (blocks.0.attn … blocks.3.mlp); collectives 9 % of the step"
    assert plan.strategies == {"blocks.0.attn.linear": "n"} and plan.shardings == {"w_0a": "tp:0"}
    assert [b.rows for b in plan.blocks] == [{"attn": "rows / 4"}]
    assert (plan.solver.method, plan.solver.status, plan.solver.gap) == ("shardings", "optimal", 0.0)


def test_a_mesh_is_given_up_only_after_two_zero_stages() -> None:
    """Slots may make a stage larger than the one before it."""
    graph, no_costs = blocks(2), cast(Any, None)
    setting = Setting(graph, MACHINE, model_of(graph), Constraints(devices=4, batch=4), no_costs)
    assert [(p.microbatches, p.replicas.zero) for p in least_memory_points(setting, Mesh(1, 1, 4))] == [(1, 3), (1, 2)]


def test_replicas_have_enough_samples_for_batch_norm_unless_asked() -> None:
    asked = Constraints(devices=4, batch=16, least_samples=8)
    assert (
        why_not(Mesh(1, 1, 4), asked, MACHINE)
        == "a replica has 4 samples, of at least 8 for batch norm unless dp= asks"
    )
    assert why_not(Mesh(2, 1, 2), asked, MACHINE) == ""
    assert why_not(Mesh(1, 1, 4), replace(asked, dp=4), MACHINE) == ""
    assert why_not(Mesh(4, 1, 1), replace(asked, batch=4), MACHINE) == "", "a model on one device has no choice"


@pytest.mark.parametrize(("reduce", "overhead"), [(0.0, 0.1), (40e-3, 0.1), (40e-3, 0.4), (10e-3, 0.02)])
def test_the_bounds_that_prune_lose_nothing(reduce: float, overhead: float) -> None:
    """The search finds what trying every mesh, number of microbatches and ZeRO stage one by one finds."""
    every = [
        meshed(
            Constraints(4, 8, pp=pp, tp=tp, dp=4 // pp // tp, zero=zero, microbatches=microbatches),
            reduce=reduce,
            overhead=overhead,
        )
        for pp, tp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
        for zero in ((0, 1) if pp * tp < 4 else (0,))
        for microbatches in (1, 2, 4, 8)
        if microbatches <= 8 // (4 // pp // tp)
    ]
    found = meshed(Constraints(4, 8), reduce=reduce, overhead=overhead)
    assert found.prediction.step_seconds == pytest.approx(min(p.prediction.step_seconds for p in every))


def test_a_row_near_the_best_step_is_the_plan_of_its_mesh() -> None:
    """The first plan of pp 2 × tp 2 that fits, which a row far from the best step would hold, takes 144 ms."""
    asked, hardware = Constraints(devices=4, batch=16), replace(MACHINE, link=Link(1e-3, 1e11))
    (row,) = [r for r in meshed(asked, hardware, reduce=40e-3).alternatives if r.label.startswith("pp 2 × tp 2")]
    plan = meshed(replace(asked, pp=2, tp=2, dp=1), hardware, reduce=40e-3)
    assert row.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "batch", "latency", "asked"),
    [
        ((3, 3, 8, 1, 1, 3, 1, 5, 8, 1, 3, 1), 8, 1e-3, {}),  # else the row of pp 4 takes 411 ms, not 374
        ((5, 1, 8, 3, 1, 5, 1, 5, 5, 2, 3, 3), 16, 1e-5, {"pp": 4, "memory": 20 * GIB}),  # else interleaved is chosen
    ],
)
def test_rows_and_neighbours_have_cuts_by_local_search(
    times: tuple[float, ...], batch: int, latency: float, asked: Mapping[str, Any]
) -> None:
    """They were found far from the best step, where cuts are not moved."""
    graph, hardware = blocks(6), replace(MACHINE, link=Link(latency, 1e11))
    groups = [[i] for i in range(12)]
    costs = Splittable(lambda b: priced(graph, groups, times, b, saved=0.2), overhead=0.02)
    constraints = Constraints(devices=4, batch=batch, recompute="none", **asked)
    setting = Setting(graph, hardware, model_of(graph), constraints, costs)
    bounds = LowerBounds(setting)
    explored = explore(setting, bounds, possible_meshes(constraints, hardware))
    best = fastest_nearby(setting, bounds, explored)
    assert best is not None
    near = neighbours(setting, best.point) + points_with_other_schedules(setting, best.point)
    rows = [min(found, key=lambda c: c.seconds) for found in explored.by_mesh.values()]
    rows += [c for c in explored.by_mesh[best.point.mesh] if c.point in near]
    for row in rows:
        moved = evaluate_cuts(setting, row.point, row.priced, row.problem, constraints.capacity_bytes(hardware))
        assert best.seconds <= row.seconds <= moved.seconds


def test_cuts_that_do_not_come_near_the_best_step_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tried = blocks(48), Mock(wraps=local_search.step_seconds)
    costs = Splittable(
        lambda b: priced(graph, [[i] for i in range(96)], [1 + i * i % 7 for i in range(96)], b, saved=0.2)
    )
    setting = Setting(graph, MACHINE, model_of(graph), Constraints(devices=4, batch=8, pp=4, schedule="1f1b"), costs)
    (mesh,) = possible_meshes(setting.constraints, MACHINE).allowed
    point = next(p for p in enumerate_points(setting, mesh) if p.microbatches == 8)
    sharding = next(shardings_at(setting, point))
    problem = make_cut_problem(setting, point, sharding)
    cut = cut_and_evaluate(setting, point, sharding, problem, float("inf"), best_seconds=0.0)
    assert cut is not None and not cut.is_improved
    monkeypatch.setattr(local_search, "step_seconds", tried)
    moved, num_tried = improve(setting, cut, float("inf")), tried.call_count
    assert moved.is_improved and moved.seconds < cut.seconds
    tried.reset_mock()
    given_up = improve(setting, cut, float("inf"), best_seconds=0.9 * moved.seconds)
    assert not given_up.is_improved and tried.call_count < num_tried / 2
    assert improve(setting, given_up, float("inf"), best_seconds=moved.seconds).seconds <= moved.seconds


@pytest.mark.parametrize(("reduce", "overhead"), [(0.0, 0.1), (40e-3, 0.1), (400e-3, 0.4)])
def test_no_other_mesh_undercuts_what_is_proven(reduce: float, overhead: float) -> None:
    every = {
        (pp, tp): meshed(Constraints(4, 8, pp=pp, tp=tp, dp=4 // pp // tp), reduce=reduce, overhead=overhead)
        for pp, tp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
    }
    found = meshed(Constraints(4, 8), reduce=reduce, overhead=overhead)
    steps = [p.prediction.step_seconds for mesh, p in every.items() if mesh != (found.mesh.pp, found.mesh.tp)]
    proven = found.solver.other_meshes
    assert proven is not None and proven.num_slower + proven.num_open == len(steps) == 5
    assert proven.num_slower <= sum(step >= found.prediction.step_seconds for step in steps)
    assert proven.bound_seconds is not None and 0 < proven.bound_seconds <= min(steps)
    assert every[1, 1].solver.other_meshes is None, "no other mesh is allowed"


@pytest.mark.parametrize(
    ("forward", "backward", "reduce", "gather", "buckets", "contention", "exposed"),
    [
        (0, 50, 40, 0, 4, 0, 10),
        (0, 50, 40, 0, 0.4, 0, 40),
        (0, 30, 40, 0, 8, 0, 10),
        (0, 10, 40, 0, 40, 0, 30),
        (0, 10, 0, 0, 4, 0, 0),
        (0, 50, 40, 0, 4, 68, 78),
        (20, 50, 40, 20, 4, 0, 15),  # each collective has a window of its own
        (10, 50, 60, 20, 10, 0, 20),
        (10, 100, 40, 20, 20, 0, 12),  # a long backward does not hide the all-gather
    ],
)
def test_an_exchange_hides_under_the_last_backward_and_the_next_forward_but_for_a_bucket(
    forward: float, backward: float, reduce: float, gather: float, buckets: float, contention: float, exposed: float
) -> None:
    stage = StageCost(
        forward_seconds=forward, backward_seconds=backward, collective_seconds=0.0, load_seconds=0.0,
        transfer_seconds=0.0, optimizer_seconds=0.0, reduce_seconds=reduce, gather_seconds=gather,
        contention_seconds=contention, num_buckets=buckets, weight_bytes=0, saved_bytes=0, received_bytes=0,
        transient_bytes=0, in_flight=1,
    )  # fmt: skip
    assert RankCost((stage,)).exposed_seconds == exposed


def test_the_step_ends_with_the_stage_that_is_last_with_reduction_and_optimizer() -> None:
    plan = meshed(Constraints(devices=2, batch=16, dp=2, zero=0, microbatches=8), reduce=40e-3)
    assert plan.prediction.reduce_seconds == pytest.approx(40e-3)
    assert plan.prediction.optimizer_seconds == pytest.approx(8e-3)
    assert plan.prediction.step_seconds == pytest.approx(8 * 24e-3 + 48e-3)


def test_zero1_is_taken_where_it_saves_time_and_where_memory_asks_for_it() -> None:
    asked = Constraints(devices=2, batch=16, dp=2)
    assert meshed(asked).zero and not meshed(replace(asked, zero=0)).zero
    assert meshed(replace(asked, zero=1)).decision.count("ZeRO-1") == 1
    with pytest.raises(InfeasibleError):
        meshed(replace(asked, zero=0, memory=30 * GIB), memory={"weight": 6.0})
    plan = meshed(replace(asked, memory=30 * GIB), memory={"weight": 6.0})
    assert plan.zero and set(plan.prediction.peak_bytes) == {24 * GIB}
    assert ("1 microbatch, no ZeRO-1", None, "does not fit: over 48.0 GiB") in listed(plan)


def test_zero2_is_taken_with_one_microbatch_where_zero1_does_not_fit() -> None:
    asked = Constraints(devices=2, batch=16, dp=2)
    weights = {"weight": 6.0}
    plan = meshed(replace(asked, memory=30 * GIB), memory=weights)
    assert plan.zero == 1 and not any("ZeRO-2" in label for label, *_ in listed(plan))
    plan = meshed(replace(asked, memory=15 * GIB), memory=weights)
    assert (plan.zero, plan.microbatches, set(plan.prediction.peak_bytes)) == (2, 1, {12 * GIB})
    assert "ZeRO-2" in plan.decision and "ZeRO-2" in str(plan)
    for row in ("2 microbatches, ZeRO-1", "1 microbatch, ZeRO-1"):
        assert (row, None, "does not fit: over 24.0 GiB") in listed(plan)
    with pytest.raises(InfeasibleError):
        meshed(replace(asked, memory=15 * GIB, zero=1), memory=weights)
    for memory, microbatches in ((15 * GIB, 2), (10 * GIB, None)):
        plan = meshed(replace(asked, memory=memory, microbatches=microbatches), memory=weights)
        assert (plan.zero, plan.microbatches) == (3, microbatches or 1)
    with pytest.raises(InfeasibleError, match=r"needs 6\.00 GiB"):  # of all points it needs least
        meshed(replace(asked, memory=5 * GIB), memory=weights)
    asked_for = meshed(replace(asked, zero=2))
    assert (asked_for.zero, asked_for.microbatches) == (2, 1)


def test_zero2_leaves_room_for_larger_microbatches() -> None:
    """Where ZeRO-1 needs small microbatches, which are slower, and ZeRO-2 does not."""
    asked = Constraints(devices=2, batch=16, dp=2, memory=30 * GIB, recompute="none")
    memory = {"weight": 6.0, "saved": 0.2}
    plan = meshed(asked, memory=memory)
    assert (plan.zero, plan.microbatches) == (1, 4)  # as fast as one microbatch, by these costs
    assert meshed(replace(asked, microbatches=1), memory=memory).zero == 2


def test_smaller_and_slower_shardings_are_tried_where_memory_binds() -> None:
    asked = Constraints(devices=4, batch=32, tp=4, memory=10 * GIB)
    plan = meshed(asked, memory={"weight": 2.0, "saved": 0.2}, levels=3)
    assert max(plan.prediction.peak_bytes) <= 10 * GIB
    assert "collectives 17 % of the step" in plan.bound_by
    with pytest.raises(InfeasibleError) as caught:
        meshed(replace(asked, tp=None, zero=0), memory={"weight": 16.0, "saved": 0.2}, levels=1)
    assert str(caught.value) == (
        "No plan fits: stage 0 needs 32.4 GiB, ranks 0–3 have 9.70 GiB (97 % of 10.0 GiB). Largest: weights with "
        "gradients and optimizer state (32.0 GiB). The smallest memory that holds one stage is 33.4 GiB per device. "
        'Use more devices, or devices with memory="34GiB" (--memory 34GiB). Of all meshes pp 1 × tp 4 × dp 1 needs '
        "least. With 16 devices it fits."
    )


def test_a_tp_that_nothing_can_use_says_what_limits_it() -> None:
    with pytest.raises(UsageError) as caught:
        meshed(Constraints(devices=6, batch=32, tp=3))
    assert str(caught.value) == (
        "tp=3: nothing in net can be split 3 ways: attention has 4 heads, 197 tokens. Use tp=2."
    )
    refused = [row for row in listed(meshed(Constraints(devices=3, batch=8, microbatches=1))) if row[1] is None]
    assert refused == [
        ("pp 1 × tp 1 × dp 3", None, "3 replicas cannot share a batch of 8 evenly"),
        ("pp 1 × tp 3 × dp 1", None, "nothing can be split 3 ways"),
    ]


def test_devices_that_no_mesh_can_use() -> None:
    with pytest.raises(InfeasibleError) as caught:
        meshed(Constraints(devices=7, batch=10), depth=3)
    assert str(caught.value) == (
        "No mesh of 7 devices works for net and a batch of 10. pp 7 × tp 1 × dp 1: can be cut into 6 pieces at most; "
        "pp 1 × tp 1 × dp 7: 7 replicas cannot share a batch of 10 evenly; pp 1 × tp 7 × dp 1: nothing can be split 7 "
        "ways. Use another number of devices or another batch."
    )


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"dp": 2, "chunks": 3},
         "ranks have several stages. Leave out dp=2 (for pp 2 × tp 1 × dp 1) or chunks=3 (for pp 1 × tp 1 × dp 2)."),
        ({"pp": 2, "zero": 1},
         "optimizer's state. Leave out pp=2 (for pp 1 × tp 1 × dp 2) or zero=1 (for pp 2 × tp 1 × dp 1)."),
        ({"dp": 2, "pins": {"blocks.0": 0, "blocks.1": 1}, "chunks": 2},
         "ranks have several stages. Leave out dp=2 (for pp 2 × tp 1 × dp 1)."),
    ],
)  # fmt: skip
def test_what_was_asked_for_and_leaves_no_mesh_is_what_to_leave_out(asked: Mapping[str, Any], remedy: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        meshed(Constraints(devices=2, batch=8, **asked))
    assert str(caught.value).endswith(remedy)


def test_too_many_chunks_for_every_mesh_are_what_to_change() -> None:
    with pytest.raises(
        InfeasibleError, match=r"pp 2 × .*: can be cut into 6 pieces at most; .*Use fewer chunks, another"
    ):
        meshed(Constraints(devices=2, batch=8, schedule="interleaved", chunks=50), depth=3)


def test_another_sharding_is_taken_where_it_is_faster_and_fits() -> None:
    asked = Constraints(devices=4, batch=32, pp=2, tp=2, memory=10 * GIB, schedule="1f1b")

    def scaled(factor: float, saved_bytes: int = 0) -> Refine:
        def refine(decision: Decision) -> Refined:
            groups = tuple(
                replace(g, forward_seconds=factor * g.forward_seconds, backward_seconds=factor * g.backward_seconds,
                        saved_bytes=saved_bytes)
                for g in decision.priced.cost.groups
            )  # fmt: skip
            cost = replace(decision.priced.cost, groups=groups)
            priced = replace(decision.priced, cost=cost, strategy_index=(0,) * len(groups))
            only = ShardingStrategy("", (), 0.0, 0.0, 0.0, 0, 0, (), (), ())
            choices = StrategyGraph(tuple(StrategyGroup(g.name, 0, (), (), (), (only,)) for g in groups), {})
            return Refined(choices, (priced,), lambda index: priced, 0.0)

        return refine

    plain, slower, faster, larger = (
        meshed(asked, refine=r) for r in (None, scaled(1.1), scaled(0.95), scaled(0.95, 9 * GIB))
    )
    assert plain.solver.method == "shardings then cuts"
    for kept in (slower, larger):
        assert kept.prediction == plain.prediction
    assert faster.prediction.step_seconds < plain.prediction.step_seconds


def test_replicas_win_where_reduction_is_free() -> None:
    plan = meshed(Constraints(devices=4, batch=32))
    assert (str(plan.mesh), plan.microbatches, plan.zero) == ("pp 1 × tp 1 × dp 4", 1, 1)
    assert plan.stages[0].ranks == (0, 1, 2, 3) and len(plan.prediction.peak_bytes) == 4
    assert plan.blocks == () and plan.strategies == {} and plan.shardings == {}
    assert Plan.from_json(plan.to_json()) == plan


def test_nodes_without_a_network_are_refused() -> None:
    machine = replace(MACHINE, devices_per_node=2, network=None)
    with pytest.raises(HardwareError, match="no network"):
        plan_for(blocks(2), Constraints(devices=4, batch=8), machine)


def test_the_network_carries_what_leaves_a_node() -> None:
    machine = replace(MACHINE, devices_per_node=2, network=Network(Port(1e-3, 1e9)))
    links = boundary_links(machine, Mesh(4))
    assert [round(link.latency_seconds, 6) for link in links] == [1e-4, 1e-3, 1e-4]
    assert [link.bytes_per_second for link in links] == pytest.approx([1e11, 1e9, 1e11])
    # Rank 2s + r talks to rank 2(s + 1) + r: from every second stage to another node.
    wide = boundary_links(replace(machine, devices_per_node=4), Mesh(4, 2))
    assert [round(link.latency_seconds, 6) for link in wide] == [1e-4, 1e-3, 1e-4]
    assert [link.latency_seconds for link in boundary_links(machine, Mesh(2, 2, 2))] == pytest.approx([1e-3])


GRADIENT_BYTES = 4 * 10**6  # of each of eight groups


def on_nodes_of_four(mesh: Mesh, ports: float, chunks: int, zero: ZeroStage) -> tuple[Setting, CutProblem]:
    """A chain of equal groups with large messages, 32 microbatches, and gradients that passes may hide."""
    machine = replace(MACHINE, devices_per_node=4, network=Network(Port(1e-5, 1e9), ports), group_collective={})
    exchange = ("reduce-scatter", "all-gather") if zero else ("all-reduce",)
    moved = [machine.collective_seconds(kind, GRADIENT_BYTES, mesh.dp, mesh.tp) for kind in exchange]
    groups = [Group(f"g{i}", (f"g{i}",), "", 2e-3, 4e-3) for i in range(8)]
    edges = [TensorEdge(f"t{i}", i, (i + 1,), 4_000_000, True) for i in range(8)]
    weights = [
        ResidentTensor(f"w{i}", 0, (i,), 1, 1e-4, moved[0], sum(moved[1:]), 1.0, gradient_bytes=GRADIENT_BYTES)
        for i in range(8)
    ]
    problem = CutProblem(
        CostGraph("net", 1, (*groups, Group("loss", (), "")), tuple(edges), tuple(weights)),
        mesh.pp * chunks, 32, None, (1,) * (mesh.pp * chunks),
        boundary_links(machine, mesh, Placement(mesh.pp, chunks)),
        tp=mesh.tp, replicas=Replicas(mesh.dp, zero), chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b",
        in_flight_profiles=(((1,) * chunks,),) * mesh.pp if chunks > 1 else (),
    )  # fmt: skip
    nothing: Any = None
    return Setting(nothing, machine, nothing, Constraints(mesh.devices, 32 * mesh.dp), nothing), problem


def busiest_port(problem: CutProblem, stage_of: Sequence[int], ports: float) -> float:
    """Seconds for which the ports of four ranks are in use in a step, by the bytes that pass them rank by rank."""
    mesh, nodes = problem.mesh, range(-(-problem.mesh.devices // 4))
    out, into = ([0.0 for _ in nodes] for _ in range(2))
    by_rank: dict[tuple[int, int], float] = {}
    for (src, dst), num_bytes in messages(problem, stage_of).items():
        for sender, receiver in zip(mesh.ranks(src % mesh.pp), mesh.ranks(dst % mesh.pp)):
            if sender // 4 != receiver // 4:
                out[sender // 4] += 32 * num_bytes
                into[receiver // 4] += 32 * num_bytes
                for one in ((sender, 0), (receiver, 1)):
                    by_rank[one] = by_rank.get(one, 0) + 32 * num_bytes
    for position in range(mesh.pp):
        reduced = GRADIENT_BYTES * sum(s % mesh.pp == position for s in stage_of[:8])
        for shard in range(mesh.tp):
            # A ring sends as much in all under ZeRO as without it.
            at = {rank // 4 for rank in mesh.ranks(position)[shard :: mesh.tp]}
            for node in at if len(at) > 1 else ():
                out[node] += 2 * (mesh.dp - 1) / mesh.dp * reduced
                into[node] += 2 * (mesh.dp - 1) / mesh.dp * reduced
    return max(max(*out, *into) / min(ports, 4), *by_rank.values()) / 1e9  # a rank uses one port


def simulated(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> float:
    """Seconds of the simulated pipeline."""
    costs = stage_costs(problem, stage_of)
    passes = [c.forward_seconds for c in costs], [c.backward_seconds for c in costs]
    return pipeline_seconds(setting, problem, stage_of, *passes, [c.wgrad_seconds for c in costs])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("mesh", "ports", "chunks"),
    [
        (Mesh(4, 1, 4), 1, 1),
        (Mesh(4, 1, 4), 1, 2),  # a stage is a node
        (Mesh(2, 2, 4), 1, 2),  # or two nodes, over which replicas reduce
        (Mesh(2, 1, 16), 1, 4),
        (Mesh(4, 2, 4), 2, 2),
        (Mesh(8, 1, 2), 1, 1),  # two stages are a node
        (Mesh(6), 2, 1),  # one rank of a node sends activations, another one gradients
    ],
)
def test_no_step_is_shorter_than_a_port_is_in_use(mesh: Mesh, ports: int, chunks: int, zero: ZeroStage) -> None:
    for own_ports in (ports, 4):
        setting, problem = on_nodes_of_four(mesh, own_ports, chunks, zero)
        stage_of = tuple(min(i, 7) * problem.stages // 8 for i in range(9))
        step, busy = step_time(setting, problem, stage_of), busiest_port(problem, stage_of, own_ports)
        assert step.seconds >= busy * (1 - 1e-9)
        assert step.pipeline_seconds == max(simulated(setting, problem, stage_of), step.port_seconds)
        around = step.reduce_seconds + step.optimizer_seconds
        assert busy - around <= step.port_seconds * (1 + 1e-9) <= busy * (1 + 2e-9)


def test_few_points_of_many_meshes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point that is cut costs a dynamic programme."""
    network = Network(Port(1e-5, 1e11))
    calls: list[CutProblem] = []

    def counted(problem: CutProblem) -> tuple[int, ...] | None:
        calls.append(problem)
        return contiguous_cuts(problem)

    monkeypatch.setattr(candidates, "contiguous_cuts", counted)
    plan = meshed(Constraints(devices=16, batch=16), replace(MACHINE, network=network), depth=20)
    assert str(plan.mesh) == "pp 1 × tp 1 × dp 16" and 0 < len(calls) <= 30


@pytest.mark.parametrize("times", [[1.0] * 7, [5.0, 1.0, 1.0, 4.0, 2.0], [0.0, 3.0, 0.1, 0.2]])
def test_the_fastest_slowest_stage_is_that_of_all_cuts(times: list[float]) -> None:
    graph = blocks(1)
    one = priced(graph, [[0], [1]], [1.0] * 2, 1).groups[0]
    groups = tuple(replace(one, forward_seconds=t, backward_seconds=0.0) for t in times)
    cost = CostGraph("net", 1, groups, ())
    for stages in range(1, len(times) + 1):
        cuts = combinations(range(1, len(times)), stages - 1)
        slowest = (max(sum(times[i:j]) for i, j in pairwise((0, *inside, len(times)))) for inside in cuts)
        assert fastest_slowest_stage(cost, stages) == pytest.approx(min(slowest), rel=1e-8)
