"""Random pipeline-cut problems, and a brute-force solver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import strategies as st

from autopar.cost.hardware.load import load_hardware
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.hardware import Link
from autopar.ir.placement import Placement
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate
from autopar.solve.cuts.merge import in_every_order, merge
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.cuts.step_time import Setting
from autopar.solve.space.constraints import Constraints, boundary_links


def setting_of(problem: CutProblem, link: Link) -> Setting:
    """A setting whose machine has one link between all its devices, and that of the problem's batch."""
    hardware = replace(load_hardware("cpu-generic"), link=link, devices_per_node=64)
    constraints = Constraints(problem.mesh.devices, problem.microbatches * problem.replicas.dp * problem.cost.batch)
    nothing: Any = None
    return Setting(nothing, hardware, nothing, constraints, nothing)


def with_link(problem: CutProblem, link: Link) -> CutProblem:
    """The problem with the boundaries that `setting_of` has."""
    hardware = setting_of(problem, link).hardware
    return replace(problem, boundary=boundary_links(hardware, problem.mesh, problem.placement))


def contiguous(problem: CutProblem) -> Iterator[tuple[int, ...]]:
    """All contiguous cuts in each order of the groups that is searched, as the stage of every group; pins are kept."""
    for merged in in_every_order(problem):
        units = len(merged.problem.cost.groups)
        for cuts in combinations(range(1, units - 1), problem.stages - 1):
            stage_of = merged.expand([sum(u >= cut for cut in cuts) for u in range(units)])
            if all(stage_of[g] == s for g, s in problem.pins.items()):
                yield stage_of


def brute_force(problem: CutProblem, link: Link) -> float | None:
    """Least simulated step over all contiguous cuts within the capacity, or None where there are none.

    A backward lets go of what was saved by whole units of groups that share a stage.
    """
    traced = merge(problem)
    fitting = (
        step_seconds(problem, stage_of, link)
        for stage_of in contiguous(problem)
        if problem.capacity_bytes is None
        or max(memory(traced.problem, traced.units(stage_of))) <= problem.capacity_bytes
    )
    return min(fitting, default=None)


def step_seconds(problem: CutProblem, stage_of: tuple[int, ...], link: Link) -> float:
    """Simulated 1F1B step and the longest optimizer, with messages sent straight to the stages that read them."""
    cost, stages = problem.cost, range(problem.stages)
    forward = [sum(g.forward_seconds for g, at in zip(cost.groups, stage_of) if at == s) for s in stages]
    backward = [sum(g.backward_seconds for g, at in zip(cost.groups, stage_of) if at == s) for s in stages]
    sent: dict[tuple[int, int], int] = {}
    for edge in cost.edges:
        src = stage_of[edge.producer]
        for dst in {stage_of[c] for c in edge.consumers} - {src}:
            sent[src, dst] = sent.get((src, dst), 0) + edge.num_bytes
            if edge.requires_grad:
                sent[dst, src] = sent.get((dst, src), 0) + edge.num_bytes
    transfers = {pair: link.seconds(n) if n else 0.0 for pair, n in sent.items()}
    schedule = generate("1f1b", Placement(problem.stages), problem.microbatches)
    optimizer = (
        sum(w.optimizer_seconds for w in cost.weights if any(stage_of[g] == s for g in w.groups)) for s in stages
    )
    return simulate(schedule, forward, backward, transfers).step_seconds + max(optimizer)


def memory(problem: CutProblem, stage_of: tuple[int, ...]) -> list[int]:
    cost, needs = problem.cost, []
    for s in range(problem.stages):
        on_stage = [g for g, at in enumerate(stage_of) if at == s]
        kept = sum(cost.groups[g].saved_bytes for g in on_stage)
        kept += sum(a.num_bytes for a in cost.saved if set(a.groups) & set(on_stage))
        for f in cost.edges:
            if stage_of[f.producer] < s and any(stage_of[c] >= s for c in f.consumers):
                kept += f.num_bytes
            if stage_of[f.producer] < s and any(stage_of[g] == s for g in f.saved_by):
                kept -= f.num_bytes
            crosses = stage_of[f.producer] <= s and any(stage_of[c] > s for c in f.consumers)
            if crosses and not any(stage_of[g] <= s for g in f.saved_by):
                kept += f.num_bytes
        weights = sum(w.num_bytes for w in cost.weights if set(w.groups) & set(on_stage))
        needs.append(weights + problem.in_flight[s] * kept + workspace_bytes(problem, on_stage))
    return needs


def workspace_bytes(problem: CutProblem, on_stage: list[int]) -> int:
    """Peak bytes of a stage's backward beyond all saved activations; those of later groups are freed by then."""
    cost, peaks = problem.cost, [0, *(problem.cost.groups[g].workspace_bytes for g in on_stage)]
    for g in on_stage:
        later = [h for h in on_stage if h > g]
        gone = sum(cost.groups[h].saved_bytes for h in later)
        gone += sum(a.num_bytes for a in cost.saved if (savers := set(a.groups) & set(on_stage)) and min(savers) > g)
        peaks.append(cost.groups[g].transient_bytes - gone)
    return max(peaks)


def group(name: str, milliseconds: float, **rest: float | int) -> Group:
    return Group(name, (name,), name, milliseconds * 1e-3, 2 * milliseconds * 1e-3, **rest)  # pyright: ignore


@st.composite
def cost_graphs(draw: st.DrawFn, max_groups: int = 6) -> CostGraph:
    """Any small DAG: branches, dead ends, several sources, shared weights and shared saved tensors."""
    size = draw(st.integers(2, max_groups))
    number = st.integers(0, 9)
    groups = tuple(
        group(
            f"g{i}",
            draw(number),
            flops=draw(number),
            saved_bytes=draw(number),
            transient_bytes=draw(number),
            workspace_bytes=max(0, draw(number) - 5),
        )
        for i in range(size)
    )
    edges = []
    for producer in range(size):
        for tensor in range(draw(st.integers(0, 2))):
            consumers = draw(st.sets(st.integers(producer + 1, size), min_size=1, max_size=3))
            num_bytes, grad = draw(number), draw(st.booleans())
            savers = [g for g in sorted(consumers) if g < size and num_bytes <= groups[g].saved_bytes]
            saved_by = tuple(savers[: draw(st.integers(0, 1))]) if tensor == 0 else ()
            edges.append(
                TensorEdge(f"t{producer}_{tensor}", producer, tuple(sorted(consumers)), num_bytes, grad, saved_by)
            )

    def resident_tensors(letter: str, optimizer: bool) -> tuple[ResidentTensor, ...]:
        return tuple(
            ResidentTensor(
                f"{letter}{i}", draw(number), tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))),
                draw(number), draw(number) * 1e-3 * optimizer,
            )
            for i in range(draw(st.integers(0, 3)))
        )  # fmt: skip

    colocated = ()
    if draw(st.integers(0, 3)) == 0:
        colocated = (tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=2)))),)
    return CostGraph("random", 1, (*groups, Group("loss", (), "", 1e-3)), tuple(edges), resident_tensors("w", True),
                     resident_tensors("s", False), colocated)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    cost = draw(cost_graphs())
    stages = draw(st.integers(1, min(3, cost.loss)))
    pins = {}
    if draw(st.integers(0, 3)) == 0:
        pins = {draw(st.integers(0, cost.loss - 1)): draw(st.integers(0, stages - 1))}
    return CutProblem(
        cost,
        stages,
        microbatches=draw(st.integers(1, 6)),
        capacity_bytes=draw(st.one_of(st.none(), st.integers(10, 120))),
        in_flight=tuple(draw(st.integers(1, 3)) for _ in range(stages)),
        boundary=tuple(Link(draw(st.integers(0, 3)) * 1e-3, 1e3) for _ in range(stages - 1)),
        pins=pins,
        gap=1e-5,
    )
