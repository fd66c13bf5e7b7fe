"""Buffers of a rank besides weights and activations: a step's inputs and symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.comm_sizes import message_bytes
from autopar.solve.cuts.intervals import leaving_edges
from autopar.solve.cuts.problem import CutProblem


def buffer_bytes(problem: CutProblem, stage_of: Sequence[int]) -> tuple[int, ...]:
    """Communication-buffer bytes per stage. Buffers that a rank allocates once count for its first stage.

    | symmetric memory | size |
    |---|---|
    | between stages | a slot for each message of a step; equal on all ranks, so that of the rank that receives most |
    | tensor-parallel ranks | the need of their largest collective |
    | replicas | the need of their largest bucket |

    Error: messages of a ragged last microbatch count as full ones. Evaluation and other batch sizes may reserve more.
    """
    incoming, placement = incoming_bytes(problem, stage_of), problem.placement
    totals = [sum(incoming[s] for s in placement.stages(p)) for p in range(problem.pp)]
    symmetric = [0] * problem.stages
    if "tp" in problem.peers:
        for group, s in zip(problem.cost.groups, stage_of, strict=True):
            first = placement.position(s)
            symmetric[first] = max(symmetric[first], group.symmetric_buffer_bytes)
    found = [incoming[s] + problem.fixed_bytes(s) + symmetric[s] for s in range(problem.stages)]
    for p, total in enumerate(totals):
        found[p] += max(totals) - total
    return tuple(found)


def incoming_bytes(problem: CutProblem, stage_of: Sequence[int]) -> list[int]:
    """Bytes of a step's messages to each stage where peers write them; none between stages of one rank."""
    incoming = [0] * problem.stages
    if not problem.places:
        return incoming
    for flow in leaving_edges(problem, stage_of):
        src, size = stage_of[flow.producer], problem.places * message_bytes(flow.num_bytes)
        for dst in {stage_of[c] for c in flow.consumers}:
            if problem.placement.are_apart(src, dst):
                incoming[dst] += size
                incoming[src] += size * flow.requires_grad
    return incoming
