"""Cuts and shardings as one problem, and the cost of a given assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.cost_graph import CostGraph, Group, TensorEdge
from autopar.ir.hardware import Link
from autopar.ir.layout import Layout
from autopar.ir.strategies import StrategyGraph
from autopar.solve.cuts.evaluate import one_way_seconds
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.shardings.cost import resharding_cost, value_edges


@dataclass(frozen=True)
class JointProblem:
    """Assignment problem: strategy and stage of every group, on ``ranks`` tensor-parallel ranks a stage.

    ``boundary``, ``in_flight``, ``pins``, ``gap`` as in `CutProblem`. ``colocated`` lists groups that must share
    a stage. With ``share_kinds`` groups of one kind run the same choice, otherwise each group has its own.
    """

    graph: StrategyGraph
    stages: int
    microbatches: int
    capacity_bytes: int | None
    in_flight: tuple[int, ...]
    boundary: tuple[Link, ...]
    ranks: int
    pins: Mapping[int, int] = field(default_factory=dict)
    colocated: tuple[tuple[int, ...], ...] = ()
    share_kinds: bool = True
    time_limit_seconds: float = 60.0
    gap: float = 1e-3


@dataclass(frozen=True)
class Assignment:
    """The choice and the stage of every group."""

    strategy_index: tuple[int, ...]
    stage_of: tuple[int, ...]


@dataclass(frozen=True)
class StageLoad:
    """``seconds`` per microbatch with conversions and transfers to and from the next stage; ``step_seconds`` once a
    step; memory at the peak."""

    seconds: float
    step_seconds: float
    memory_bytes: int


def local_bytes(num_bytes: int, layout: Layout, ranks: int) -> int:
    """Bytes of a rank's part of a value."""
    return num_bytes // ranks ** len(layout.splits)


def stage_loads(problem: JointProblem, answer: Assignment) -> tuple[StageLoad, ...]:
    """Time and memory of every stage.

    A tensor is sent as it was made and converted where it is read, once for all readers of a stage; its gradient takes
    the same way back.

    Error: the tensors that a stage receives and its working set are not in its memory, a weight that two of its groups
    read counts twice.
    """
    graph, stage_of = problem.graph, answer.stage_of
    seconds, step, memory = ([0.0] * problem.stages, [0.0] * problem.stages, [0] * problem.stages)
    for group, k, s in zip(graph.groups, answer.strategy_index, stage_of, strict=True):
        choice = group.strategies[k]
        seconds[s] += choice.seconds
        step[s] += choice.step_seconds
        memory[s] += choice.weight_bytes + problem.in_flight[s] * choice.saved_bytes
    crossing = [0] * len(problem.boundary)
    for wire in value_edges(graph):
        made = wire.layouts[answer.strategy_index[wire.producer]]
        for s, read in {(stage_of[r.group], r.layouts[answer.strategy_index[r.group]]) for r in wire.consumers}:
            converted = resharding_cost(graph, wire.value, made, read)
            seconds[s] += converted.seconds
            memory[s] += problem.in_flight[s] * converted.saved_bytes
        for s in range(stage_of[wire.producer], max(stage_of[r.group] for r in wire.consumers)):
            crossing[s] += local_bytes(graph.value_bytes[wire.value], made, problem.ranks)
    for s, (num_bytes, link) in enumerate(zip(crossing, problem.boundary, strict=True)):
        seconds[s] += 2 * one_way_seconds(num_bytes, link)
    return tuple(map(StageLoad, seconds, step, memory))


def joint_seconds(problem: JointProblem, loads: Sequence[StageLoad]) -> float:
    """Step time: (m − 1)·max t + Σ t + max step seconds."""
    times = [load.seconds for load in loads]
    return (problem.microbatches - 1) * max(times) + sum(times) + max(load.step_seconds for load in loads)


def relaxed(problem: JointProblem) -> CutProblem:
    """The cut problem where every group runs its cheapest choice and every tensor is sent in its smallest layout.

    Without memory, steps and conversions: its objective at any cuts is a lower bound of the joint one.
    """
    graph = problem.graph
    groups = tuple(Group(g.name, (), "", min(choice.seconds for choice in g.strategies)) for g in graph.groups)
    flows = tuple(
        TensorEdge(
            wire.value,
            wire.producer,
            tuple(reading.group for reading in wire.consumers),
            min(local_bytes(graph.value_bytes[wire.value], made, problem.ranks) for made in wire.layouts),
            requires_grad=True,
        )
        for wire in value_edges(graph)
    )
    return CutProblem(
        CostGraph("joint", 1, groups, flows),
        problem.stages,
        problem.microbatches,
        problem.capacity_bytes,
        problem.in_flight,
        problem.boundary,
        pins=problem.pins,
        time_limit_seconds=problem.time_limit_seconds,
        gap=problem.gap,
    )
