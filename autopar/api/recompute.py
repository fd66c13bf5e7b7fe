"""Activation checkpointing: the plan's stages that recompute, as checkpoint segments of their programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.groups.recompute_segments import segment_starts
from autopar.cost.ops.op_stats import graph_stats
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.program import Program


def with_recompute_segments(programs: Sequence[Program], graph: Graph, plan: Plan) -> tuple[Program, ...]:
    """The programs of a graph, with checkpoint segments on the stages that recompute.

    A segment that is divided by a pipeline cut becomes one segment on each side.
    """
    recomputes = any(stage.recompute == "all" for stage in plan.stages)
    if not recomputes or graph.mode == "eval":  # without a backward nothing is recomputed
        return tuple(programs)
    begins = segment_starts(graph, graph_stats(graph, plan.hardware.device_type))
    place = {op.name: i for i, op in enumerate(graph.ops)}
    return tuple(
        replace(program, segments=local_segment_starts([place[op.name] for op in program.ops], begins))
        if plan.stages[program.stage].recompute == "all"
        else program
        for program in programs
    )


def local_segment_starts(places: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """Indices of a program's operations that begin a segment.

    Args:
        places: index in the graph of each of the program's operations.
        begins: indices in the graph at which segments begin.
    """
    segment = [sum(begin <= place for begin in begins) for place in places]
    return tuple(i for i, own in enumerate(segment) if own and (i == 0 or own != segment[i - 1]))
