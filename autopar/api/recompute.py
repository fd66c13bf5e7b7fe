"""Activation checkpointing: the segments that the plan's stages recompute, as checkpoint segments of their programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.groups.recompute_segments import segment_starts
from autopar.cost.ops.op_stats import graph_stats
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.plan_invariants import FEWER_SEGMENTS
from autopar.ir.program import Program
from autopar.ir.units import plural


def with_recompute_segments(
    programs: Sequence[Program], graph: Graph, undivided: Graph, plan: Plan, planned: bool
) -> tuple[Program, ...]:
    """The programs of a training graph, with checkpoint segments on the stages that recompute.

    A segment that is divided by a pipeline cut becomes one segment on each side.

    Args:
        undivided: the graph as it would be on a single stage, whose segments the planner knows. At a cut ``graph`` may
            have more collectives, and others would be better.
        planned: whether the graph has the plan's shapes. At others a stage may have fewer segments than it recomputes,
            and recomputes all of them.
    Raises:
        PlanError: a stage of a plan made by hand has, at the plan's shapes, no more segments than it recomputes.
    """
    place = {op.name: i for i, op in enumerate(graph.ops)}
    starts = segment_starts(undivided, graph_stats(undivided, plan.hardware.device_type))
    begins = [place[undivided.ops[i].name] for i in starts]
    found = []
    for program in programs:
        bounds = local_segments([place[op.name] for op in program.ops], begins)
        stage, count = plan.stages[program.stage], max(0, len(bounds) - 1)
        level = stage.recompute
        if isinstance(level, int) and level >= count and planned and not stage.num_segments:
            raise PlanError(
                f"Plan field stages.{program.stage}.recompute: is {level}, the stage has "
                f"{plural(count, 'segment')}. {FEWER_SEGMENTS}"
            )
        kept = {"none": (), "all": bounds}[level] if isinstance(level, str) else bounds[: level + 1]
        found.append(replace(program, segments=kept))
    return tuple(found)


def local_segments(places: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """Indices of a program's operations that begin a segment, and the program's end; empty without a segment.

    Args:
        places: index in the graph of each of the program's operations.
        begins: indices in the graph at which segments begin.
    """
    segment = [sum(begin <= place for begin in begins) for place in places]
    starts = [i for i, own in enumerate(segment) if own and (i == 0 or own != segment[i - 1])]
    return (*starts, len(places)) if starts else ()
