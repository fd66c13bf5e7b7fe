"""The search: microbatches, pins, plans that reproduce their assignment, and what it says when nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.hardware.load import load_hardware
from autopar.errors import HardwareError, InfeasibleError, UsageError
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph, Op, Ref, Value, Weight
from autopar.ir.hardware import Hardware, Link
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.microbatches import microbatch_factors, microbatch_size, microbatch_sizes
from autopar.ir.plan import BlockSharding, Collective, ModelInfo, Plan, SolverInfo
from autopar.ir.table import plan_text
from autopar.schedule.simulate import one_f_one_b_seconds
from autopar.solve.cuts.evaluate import RankCost, StageCost
from autopar.solve.cuts.problem import Priced
from autopar.solve.result.make_plan import Decision, op_ranges
from autopar.solve.search import Refine, Refined, search
from autopar.solve.space.constraints import Constraints, boundary_links

GIB = 2**30
# Nothing but the model in memory: on CPU inputs stay where the caller has them.
MACHINE = replace(
    load_hardware("h200-nvlink"), device_type="cpu", reserve_bytes=0, memory_bytes=100 * GIB, link=Link(1e-4, 1e11)
)


def op(name: str, reads: Sequence[str], weights: Sequence[str] = ()) -> Op:
    args = tuple(Ref(r) for r in (*reads, *weights))
    module = name.rpartition(".")[0]
    return Op(name, "aten.linear.default", args, (), (Value(f"{name}:out", (4,), "float32", (1,), True),), module)


def graph_of(ops: Sequence[Op], together: tuple[tuple[str, ...], ...] = ()) -> Graph:
    weights = {
        r: Weight(r, "parameter", (2, 2), "float32", True, (r,)) for o in ops for r in o.reads if r.startswith("w_")
    }
    return Graph(
        model="net",
        mode="train",
        batch=1,
        inputs=(Value("x", (4,), "float32", (1,)),),
        weights=tuple(weights.values()),
        ops=tuple(ops),
        outputs=(Ref(ops[-1].outputs[0].name),),
        leaves=(Ref("x"),),
        in_spec=None,
        out_spec=None,
        colocated=together,
    )


def model_of(graph: Graph) -> ModelInfo:
    return ModelInfo(graph.model, graph.fingerprint, graph.num_params, ())


def priced(graph: Graph, groups: Sequence[Sequence[int]], milliseconds: Sequence[float], batch: int,
           saved: float = 0.0, weight: float = 0.0) -> CostGraph:  # fmt: skip
    """A cost graph with the given sets of operations as groups; ``saved`` and ``weight`` are GiB per group."""
    group_of = {graph.ops[i].name: g for g, members in enumerate(groups) for i in members}
    loss = len(groups)
    readers: dict[str, set[int]] = {}
    for o in graph.ops:
        for r in o.reads:
            readers.setdefault(r, set()).add(group_of[o.name])
    readers.setdefault(graph.ops[-1].outputs[0].name, set()).add(loss)
    flows = []
    for o in graph.ops:
        value, here = o.outputs[0], group_of[o.name]
        consumers = tuple(sorted(readers.get(value.name, set()) - {here}))
        if consumers:
            flows.append(TensorEdge(value.name, here, consumers, value.num_bytes * batch, True))
    named = [graph.ops[members[0]] for members in groups]
    return CostGraph(
        graph.model,
        batch,
        (
            *(
                Group(o.name, tuple(graph.ops[i].name for i in members), o.module, t * batch * 1e-3,
                      2 * t * batch * 1e-3, t, int(saved * batch * GIB))
                for o, members, t in zip(named, groups, milliseconds)
            ),
            Group("loss", (), ""),
        ),
        tuple(flows),
        tuple(
            ResidentTensor(w.name, int(weight * GIB), tuple(sorted(readers[w.name])), w.numel, 1e-3)
            for w in graph.weights
        ),
        colocated=tuple(tuple(sorted({group_of[n] for n in names})) for names in graph.colocated),
    )  # fmt: skip


def blocks(count: int) -> Graph:
    """A chain of blocks, each an attention and a perceptron."""
    ops, value = [], "x"
    for b in range(count):
        for part in ("attn.linear", "mlp.linear"):
            ops.append(op(f"blocks.{b}.{part}", [value], [f"w_{b}{part[0]}"]))
            value = ops[-1].outputs[0].name
    return graph_of(ops)


@dataclass(frozen=True)
class Unsharded:
    """Prices of a model whose operations nobody splits and whose replicas reduce gradients in no time."""

    cost_at: Callable[[int], CostGraph]

    def priced(self, tp: int, dp: int, zero1: bool, size: int, microbatches: int, memory_level: int) -> Priced | None:
        cost = self.cost_at(size)
        return Priced(cost, notes=("attention has 3 heads", "197 tokens")) if memory_level == 0 else None

    def floor_seconds(self, tp: int, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups) / tp

    def bound_seconds(self, tp: int, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups)


def pipeline(cost_at: Callable[[int], CostGraph], graph: Graph, hardware: Hardware, asked: Constraints) -> Plan:
    """The plan with a stage on every device."""
    return search(Unsharded(cost_at), graph, hardware, replace(asked, pp=asked.devices), model_of(graph))


def plan_for(graph: Graph, constraints: Constraints, hardware: Hardware = MACHINE, **memory: float) -> Plan:
    groups = [[i] for i in range(len(graph.ops))]
    times = [1.0] * len(groups)
    asked = replace(constraints, recompute="none")
    return pipeline(lambda b: priced(graph, groups, times, b, **memory), graph, hardware, asked)


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
@settings(max_examples=examples(120), deadline=None)
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
@settings(max_examples=examples(100), deadline=None)
def test_ranges_leave_the_fewest_exceptions(home: list[int]) -> None:
    graph = graph_of([op(f"op{i}", ["x"]) for i in range(len(home))])
    cost = priced(graph, [[i] for i in range(len(home))], [1.0] * len(home), 1)
    found = op_ranges(graph, cost, (*home, 2))
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
    asked = Constraints(devices=4, batch=24, memory=30 * GIB)
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
    plan = plan_for(blocks(2), Constraints(devices=2, batch=12, microbatches=4), free)
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
        ({"dp": 1, "zero1": True},
         "zero1=True with dp=1: there are no replicas to share the optimizer's state. Use dp=2 or more, or leave zero1 "
         "out."),
        ({"schedule": "forward-only"},
         "schedule='forward-only' is unknown. It is one of 1f1b, gpipe, interleaved, interleaved-overlap, auto."),
        ({"schedule": "gpipe", "chunks": 2},
         "chunks=2 with schedule='gpipe', under which each rank has one. Use schedule='interleaved', "
         "'interleaved-overlap' or 'auto', or leave chunks out."),
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
    asked = Constraints(devices=3, batch=8, microbatches=8)
    solved = plan_for(blocks(4), asked)
    monkeypatch.setattr("autopar.solve.cuts.solve.MAX_OPEN", 0)
    monkeypatch.setattr("autopar.solve.cuts.solve.slowest_limit", lambda problem, value: float("inf"))
    found = plan_for(blocks(4), asked)
    assert found.prediction == solved.prediction
    assert (solved.solver.status, found.solver.status) == ("optimal", "contiguous cuts")
    assert found.solver.gap > solved.solver.gap


@pytest.mark.parametrize(
    ("times", "microbatches", "shorter"),
    [((4, 1, 3, 2, 3, 5), 3, 15), ((4, 5, 3, 1, 5, 1), 2, 4), ((4, 4, 4, 4, 4, 4), 6, 0)],
)
def test_no_other_cuts_simulate_faster(times: tuple[float, ...], microbatches: int, shorter: int) -> None:
    """All cuts by pins, against those of the integer program moved by simulation; by hand: milliseconds of 1F1B."""
    graph, hardware = blocks(3), replace(MACHINE, link=Link(0.0, 1e15))
    groups = [[i] for i in range(6)]

    def step_of(pins: Mapping[str, int]) -> Plan:
        asked = Constraints(devices=3, batch=microbatches, microbatches=microbatches, pins=pins)
        return pipeline(lambda b: priced(graph, groups, times, b), graph, hardware, asked)

    plan = step_of({})
    pinned = [
        step_of({o.name: (i >= a) + (i >= b) for i, o in enumerate(graph.ops)}) for a, b in combinations(range(1, 6), 2)
    ]
    fastest = min(p.prediction.step_seconds for p in pinned)
    assert plan.prediction.step_seconds == pytest.approx(fastest)
    certified = plan.prediction.step_seconds / (1 - plan.solver.moved_share)
    assert round((certified - fastest) * 1e3) == shorter and plan.solver.gap < 1e-3
    assert "then cuts moved" in plan_text(plan, 160) if shorter else not plan.solver.moved_share


# -- pins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "lengths"),
    [
        ({}, [4, 4]),
        ({"blocks.0.mlp": 1}, [1, 7]),
        ({"blocks.2": 0}, [6, 2]),
        ({"blocks.2": 0, "blocks.2.mlp": 1}, [5, 3]),
        ({"blocks.2.attn.linear": 0}, [5, 3]),
    ],
)
def test_pins_by_module_and_operation(pins: Mapping[str, int], lengths: list[int]) -> None:
    graph = blocks(4)
    stage_of = plan_for(graph, Constraints(devices=2, batch=8, microbatches=8, pins=pins)).stage_of(graph)
    assert [list(stage_of.values()).count(s) for s in (0, 1)] == lengths


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"block.3": 1}, "Cannot pin 'block.3': net has no operation or module of that name. Did you mean blocks.3 or "
                         "blocks.2 or blocks.1?"),
        ({"blocks.3": 2}, "blocks.3 is pinned to stage 2, stages are 0 to 1. Pin it to one of these."),
        ({"blocks.1.mlp": 1, "blocks.2.attn": 0},
         "Pins contradict the model's order: blocks.2.attn.linear is pinned to stage 0, and reads what comes from "
         "blocks.1.mlp.linear, pinned to stage 1. Pin blocks.1.mlp.linear to stage 0 or earlier, or "
         "blocks.2.attn.linear to stage 1 or later."),
    ],
)  # fmt: skip
def test_wrong_pins_are_refused(pins: Mapping[str, int], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_for(blocks(4), Constraints(devices=2, batch=8, pins=pins))
    assert str(caught.value) == text


def test_two_pins_for_one_group_are_refused() -> None:
    graph = graph_of([op("a.one", ["x"]), op("b.two", ["a.one:out"]), op("c.three", ["b.two:out"])])
    with pytest.raises(UsageError) as caught:
        pipeline(lambda b: priced(graph, [[0, 1], [2]], [1.0, 1.0], b), graph, MACHINE,
                 Constraints(devices=2, batch=8, pins={"a": 0, "b": 1}))  # fmt: skip
    assert str(caught.value) == (
        "Pins contradict each other: a is pinned to stage 0 and b to stage 1, but both reach a.one, which cannot be "
        "divided. Pin both to one stage."
    )


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
    assert len(plan_for(blocks(8), Constraints(devices=4, batch=8, microbatches=8, memory=40 * GIB),
                        weight=6.0, saved=0.5).stages) == 4  # fmt: skip
    assert len(plan_for(blocks(8), Constraints(devices=2, batch=8, microbatches=8, memory=58 * GIB),
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

    asked = Constraints(devices=2, batch=8, microbatches=8)
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


# -- meshes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Splittable:
    """Prices in which ``tp`` ranks share all work but ``overhead`` of it, unless ``unsplit`` says why they cannot.

    The gradients of replicas take ``reduce`` seconds in all. Each memory level halves what weights take, and adds the
    overhead once more.
    """

    cost_at: Callable[[int], CostGraph]
    overhead: float = 0.1
    reduce: float = 0.0
    levels: int = 1
    able: tuple[int, ...] = (2, 4, 8)

    def priced(self, tp: int, dp: int, zero1: bool, size: int, microbatches: int, memory_level: int) -> Priced | None:
        if memory_level >= (self.levels if tp > 1 else 1):
            return None
        whole = self.cost_at(size)
        if tp > 1 and tp not in self.able:
            return Priced(whole, notes=("attention has 4 heads", "197 tokens"))
        extra = self.overhead * (memory_level + 1) * (tp > 1)
        groups = tuple(
            replace(g, forward_seconds=(1 + extra) * g.forward_seconds / tp,
                    backward_seconds=(1 + extra) * g.backward_seconds / tp,
                    forward_collective_seconds=extra * g.forward_seconds / tp,
                    backward_collective_seconds=extra * g.backward_seconds / tp, saved_bytes=g.saved_bytes // tp)
            for g in whole.groups
        )  # fmt: skip
        share = tp * 2**memory_level * (2 if zero1 else 1)
        weights = tuple(
            replace(w, num_bytes=w.num_bytes // share,
                    optimizer_seconds=w.optimizer_seconds / tp / (dp if zero1 else 1),
                    reduce_seconds=self.reduce / len(whole.weights) / tp * (dp > 1))
            for w in whole.weights
        )  # fmt: skip
        half = extra * sum(g.seconds for g in whole.groups) / tp / 2
        collectives = tuple(Collective("fc", "all-reduce", way, 2**20, half) for way in ("forward", "backward"))
        return Priced(
            cost=replace(whole, groups=groups, weights=weights),
            strategies={whole.groups[0].name: "n"} if tp > 1 else {},
            storage={whole.weights[0].name: Layout.parse("tp:0")} if tp > 1 else {},
            blocks=(BlockSharding("blocks.*", 1, {"attn": f"rows / {tp}"}, collectives),) if tp > 1 else (),
        )

    def floor_seconds(self, tp: int, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups) / tp

    def bound_seconds(self, tp: int, size: int) -> float:
        return sum(g.seconds for g in self.cost_at(size).groups) / (tp if tp == 1 or tp in self.able else 1)


def meshed(asked: Constraints, hardware: Hardware = MACHINE, depth: int = 4, memory: Mapping[str, float] = {},
           refine: Refine | None = None, **costs: Any) -> Plan:  # fmt: skip
    """The plan for a chain of blocks under the prices of `Splittable`."""
    graph = blocks(depth)
    groups = [[i] for i in range(len(graph.ops))]

    def cost_at(batch: int) -> CostGraph:
        return priced(graph, groups, [1.0] * len(groups), batch, **memory)

    asked = replace(asked, recompute="none")
    return search(Splittable(cost_at, **costs), graph, hardware, asked, model_of(graph), refine)


def listed(plan: Plan) -> list[tuple[str, int | None, str]]:
    """Label, milliseconds and note of every alternative."""
    return [
        (a.label, None if a.step_seconds is None else round(a.step_seconds * 1e3), a.note) for a in plan.alternatives
    ]


def test_the_mesh_is_chosen_and_every_other_is_listed_with_what_it_loses_on() -> None:
    plan = meshed(Constraints(devices=4, batch=32), reduce=40e-3)
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
    assert (plan.solver.method, plan.solver.status) == ("shardings then cuts", "optimal for the cuts")
    # Of 213.2 ms the bound over all shardings leaves out the collectives, 19.2 ms, and lets each weight's optimizer be
    # split four ways, as that of the first one is.
    assert plan.solver.gap == pytest.approx((19.2 + 7 * 0.25 * 0.75) / 213.2)


@pytest.mark.parametrize(("reduce", "overhead"), [(0.0, 0.1), (40e-3, 0.1), (40e-3, 0.4), (10e-3, 0.02)])
def test_the_bounds_that_prune_lose_nothing(reduce: float, overhead: float) -> None:
    """The search finds what trying every mesh, number of microbatches and ZeRO-1 one by one finds."""
    every = [
        meshed(
            Constraints(4, 8, pp=pp, tp=tp, dp=4 // pp // tp, zero1=zero1, microbatches=microbatches),
            reduce=reduce,
            overhead=overhead,
        )
        for pp, tp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
        for zero1 in ((False, True) if pp * tp < 4 else (False,))
        for microbatches in (1, 2, 4, 8)
        if microbatches <= 8 // (4 // pp // tp)
    ]
    found = meshed(Constraints(4, 8), reduce=reduce, overhead=overhead)
    assert found.prediction.step_seconds == pytest.approx(min(p.prediction.step_seconds for p in every))


@pytest.mark.parametrize(
    ("backward", "reduce", "mebibytes", "drag", "exposed"),
    [
        (50, 40, 100, 0, 10),
        (50, 40, 10, 0, 40),
        (30, 40, 200, 0, 10),
        (30, 40, 100, 0, 10),
        (10, 40, 1000, 0, 30),
        (10, 0, 100, 0, 0),
        (50, 40, 100, 68, 78),
    ],
)
def test_a_reduction_is_hidden_by_the_last_backward_but_for_its_last_bucket_and_what_it_drags(
    backward: float, reduce: float, mebibytes: int, drag: float, exposed: float
) -> None:
    stage = StageCost(0.0, backward, 0.0, 0.0, 0.0, 0.0, reduce, drag, mebibytes * 2**18, 0, 0, 0, 0, 1)
    assert RankCost((stage,)).exposed_seconds == exposed


def test_the_step_ends_with_the_stage_that_is_last_with_reduction_and_optimizer() -> None:
    plan = meshed(Constraints(devices=2, batch=16, dp=2, zero1=False, microbatches=8), reduce=40e-3)
    assert plan.prediction.reduce_seconds == pytest.approx(40e-3)
    assert plan.prediction.optimizer_seconds == pytest.approx(8e-3)
    assert plan.prediction.step_seconds == pytest.approx(8 * 24e-3 + 48e-3)


def test_zero1_is_taken_where_it_saves_time_and_where_memory_asks_for_it() -> None:
    asked = Constraints(devices=2, batch=16, dp=2)
    assert meshed(asked).zero1 and not meshed(replace(asked, zero1=False)).zero1
    assert meshed(replace(asked, zero1=True)).decision.count("ZeRO-1") == 1
    with pytest.raises(InfeasibleError):
        meshed(replace(asked, zero1=False, memory=30 * GIB), memory={"weight": 6.0})
    plan = meshed(replace(asked, memory=30 * GIB), memory={"weight": 6.0})
    assert plan.zero1 and set(plan.prediction.peak_bytes) == {24 * GIB}
    assert ("1 microbatch, no ZeRO-1", None, "does not fit: over 48.0 GiB") in listed(plan)


def test_smaller_and_slower_shardings_are_tried_where_memory_binds() -> None:
    asked = Constraints(devices=4, batch=32, tp=4, memory=10 * GIB)
    plan = meshed(asked, memory={"weight": 8.0, "saved": 0.2}, levels=3)
    assert max(plan.prediction.peak_bytes) <= 10 * GIB
    assert "collectives 17 % of the step" in plan.bound_by
    with pytest.raises(InfeasibleError) as caught:
        meshed(replace(asked, tp=None), memory={"weight": 16.0, "saved": 0.2}, levels=1)
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
    refused = [row for row in listed(meshed(Constraints(devices=3, batch=8))) if row[1] is None]
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
        ({"dp": 2, "schedule": "interleaved", "chunks": 3},
         "ranks have several stages. Leave out dp=2 (for pp 2 × tp 1 × dp 1) or chunks=3 (for pp 1 × tp 1 × dp 2)."),
        ({"pp": 2, "zero1": True},
         "optimizer's state. Leave out pp=2 (for pp 1 × tp 1 × dp 2) or zero1 (for pp 2 × tp 1 × dp 1)."),
        ({"dp": 2, "pins": {"blocks.0": 0, "blocks.1": 1}, "chunks": 2, "schedule": "interleaved"},
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


def test_what_was_refined_is_kept_where_it_is_faster_and_fits_and_certifies_either_way() -> None:
    asked = Constraints(devices=4, batch=32, pp=2, tp=2, memory=10 * GIB)
    solver = SolverInfo("HiGHS", "optimal", 0.0, 1.0, method="joint")

    def scaled(factor: float, saved_bytes: int = 0) -> Refine:
        def refine(decision: Decision) -> Refined:
            groups = tuple(
                replace(g, forward_seconds=factor * g.forward_seconds, backward_seconds=factor * g.backward_seconds,
                        saved_bytes=saved_bytes)
                for g in decision.priced.cost.groups
            )  # fmt: skip
            priced = replace(decision.priced, cost=replace(decision.priced.cost, groups=groups))
            return Refined(priced, decision.stage_of, solver, gap=0.04)

        return refine

    plain, slower, faster, larger = (
        meshed(asked, refine=r) for r in (None, scaled(1.1), scaled(0.95), scaled(0.95, 9 * GIB))
    )
    assert plain.solver.method == "shardings then cuts"
    for kept in (slower, larger):
        assert kept.prediction == plain.prediction
        assert kept.solver == replace(solver, gap=0.04, status="optimal for the cuts")
    assert faster.solver == solver and faster.prediction.step_seconds < plain.prediction.step_seconds


def test_replicas_win_where_reduction_is_free() -> None:
    plan = meshed(Constraints(devices=4, batch=32))
    assert (str(plan.mesh), plan.microbatches, plan.zero1) == ("pp 1 × tp 1 × dp 4", 1, True)
    assert plan.stages[0].ranks == (0, 1, 2, 3) and len(plan.prediction.peak_bytes) == 4
    assert plan.blocks == () and plan.strategies == {} and plan.shardings == {}
    assert Plan.from_json(plan.to_json()) == plan


def test_nodes_without_a_network_are_refused() -> None:
    machine = replace(MACHINE, devices_per_node=2, network=None)
    with pytest.raises(HardwareError, match="no network"):
        plan_for(blocks(2), Constraints(devices=4, batch=8), machine)


def test_the_network_carries_what_leaves_a_node() -> None:
    machine = replace(MACHINE, devices_per_node=2, network=Link(1e-3, 1e9))
    links = boundary_links(machine, Mesh(4))
    assert [round(link.latency_seconds, 6) for link in links] == [1e-4, 1e-3, 1e-4]
    assert [link.bytes_per_second for link in links] == pytest.approx([1e11, 1e9, 1e11])
    # Rank 2s + r talks to rank 2(s + 1) + r: from every second stage to another node.
    wide = boundary_links(replace(machine, devices_per_node=4), Mesh(4, 2))
    assert [round(link.latency_seconds, 6) for link in wide] == [1e-4, 1e-3, 1e-4]
    assert [link.latency_seconds for link in boundary_links(machine, Mesh(2, 2, 2))] == pytest.approx([1e-3])
