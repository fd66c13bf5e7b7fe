"""Programs of stages that recompute: the plan's decision brought to the operations of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.groups.checkpoint_segments import segments
from autopar.cost.ops.op_stats import op_facts
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.program import Program


def with_recompute_segments(programs: Sequence[Program], graph: Graph, plan: Plan) -> tuple[Program, ...]:
    """The programs of a graph, with segments on the stages that recompute by the plan.

    A segment of the graph that a cut divides becomes one on each side.
    """
    recomputes = any(stage.recompute == "all" for stage in plan.stages)
    if not recomputes or graph.mode == "eval":  # only a backward needs segments
        return tuple(programs)
    begins = segments(graph, op_facts(graph, plan.hardware.device_type))
    place = {op.name: i for i, op in enumerate(graph.ops)}
    return tuple(
        replace(program, segments=segment_starts([place[op.name] for op in program.ops], begins))
        if plan.stages[program.stage].recompute == "all"
        else program
        for program in programs
    )


def segment_starts(places: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """Which of a program's operations, at these places of its graph, are the first of a segment."""
    segment = [sum(begin <= place for begin in begins) for place in places]
    return tuple(i for i, own in enumerate(segment) if own and (i == 0 or own != segment[i - 1]))
