"""What a rank has beside weights and activations: a step's inputs, and memory that peers write into and read."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.comm_sizes import message_bytes
from autopar.solve.cuts.problem import CutProblem


def buffer_bytes(problem: CutProblem, stage_of: Sequence[int]) -> tuple[int, ...]:
    """Of every stage its part of that, byte; what its rank has only once counts for the rank's first stage.

    | memory that peers reach | size |
    |---|---|
    | between stages | a place for each message of a step; on all ranks as much as on the one that receives most |
    | of tensor-parallel ranks | what their largest collective takes |
    | of replicas | what their largest bucket takes |

    Error: of a ragged last microbatch, whose messages count as whole ones; programs that only evaluate, and batches of
        other sizes, may reserve more.
    """
    incoming, pp = incoming_bytes(problem, stage_of), problem.pp
    most = max(sum(incoming[p::pp]) for p in range(pp))
    boards = [0] * problem.stages
    if "tp" in problem.peers:
        for group, s in zip(problem.cost.groups, stage_of, strict=True):
            boards[s % pp] = max(boards[s % pp], group.symmetric_buffer_bytes)
    found = [incoming[s] + problem.fixed_bytes(s) + boards[s] for s in range(problem.stages)]
    for p in range(pp):
        found[p] += most - sum(incoming[p::pp])
    return tuple(found)


def incoming_bytes(problem: CutProblem, stage_of: Sequence[int]) -> list[int]:
    """What the messages of a step to each stage take where peers write them; between stages of one rank there are
    none."""
    incoming = [0] * problem.stages
    if not problem.places:
        return incoming
    for flow in problem.cost.edges:
        src, size = stage_of[flow.producer], problem.places * message_bytes(flow.num_bytes)
        for dst in {stage_of[c] for c in flow.consumers}:
            if (dst - src) % problem.pp:
                incoming[dst] += size
                incoming[src] += size * flow.requires_grad
    return incoming
