"""Blocks of parameters that stay gathered under ZeRO-3: those that save most time in the memory that is left.

Integer program, for each rank: x[b] ∈ {0, 1} says whether block b is kept;
maximise Σ seconds[b] · x[b] where Σ bytes[b] · x[b] ≤ the bytes that the rank has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from autopar.ir.cost_graph import ResidentTensor
from autopar.solve.backend import default_solver, run, value_of
from autopar.solve.cuts.evaluate import rank_costs, stage_costs
from autopar.solve.cuts.problem import CutProblem

GAP = 1e-3  # relative distance from the optimum at which the solver may stop
TIME_LIMIT_SECONDS = 1.0


@dataclass(frozen=True)
class Block:
    """A gathered block on a rank: bytes that keeping it takes, and seconds of a step that it saves.

    Error: seconds are the gathers' own; those that compute hides count for less than those that it does not.
    """

    name: str
    num_bytes: int
    seconds: float


def kept_blocks(problem: CutProblem, stage_of: Sequence[int], limit_bytes: float) -> frozenset[str]:
    """Names of the blocks to keep, on all ranks, where none is kept yet.

    Args:
        stage_of: stage of each group.
        limit_bytes: memory of a rank.
    """
    costs = rank_costs(problem, stage_costs(problem, stage_of))
    kept: set[str] = set()
    for position, cost in enumerate(costs):
        blocks = blocks_at(problem, stage_of, position)
        left = limit_bytes - cost.memory_bytes
        if left >= sum(block.num_bytes for block in blocks):
            kept |= {block.name for block in blocks}
        else:
            kept |= most_saving(blocks, left)
    return frozenset(kept)


def blocks_at(problem: CutProblem, stage_of: Sequence[int], position: int) -> list[Block]:
    """Gathered blocks of the ranks at a position. A block that is cut counts at each position with all of its time."""
    stages = set(problem.stages_at(position))
    weights: defaultdict[str, list[ResidentTensor]] = defaultdict(list)
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for weight in problem.cost.weights:
        here = {g for g in weight.groups if stage_of[g] in stages}
        if weight.is_gathered and here:
            weights[weight.block].append(weight)
            numbers[weight.block] |= here
    found: list[Block] = []
    for name, own in weights.items():
        groups = [problem.cost.groups[g] for g in numbers[name]]
        waited = sum(g.forward_exchange_seconds + g.backward_exchange_seconds for g in groups)
        whole = sum(w.copy_bytes or w.gradient_bytes for w in own)
        found.append(Block(name, whole - whole // problem.replicas.sharing, problem.microbatches * waited))
    return found


def most_saving(blocks: Sequence[Block], limit_bytes: float) -> set[str]:
    """Names of the blocks that save most seconds in so many bytes.

    Error: at most `GAP` of these seconds, or that of `greedily_kept` where the solver finds nothing better in time.
    """
    greedy = greedily_kept(blocks, limit_bytes)
    if limit_bytes <= 0 or not greedy:
        return {block.name for block in greedy}
    total = sum(block.seconds for block in blocks)
    program = pulp.LpProblem("kept_blocks", pulp.LpMaximize)
    kept = [program.add_variable(f"x{number}", cat="Binary") for number in range(len(blocks))]
    program += pulp.lpSum(block.seconds / total * x for block, x in zip(blocks, kept, strict=True))
    program += pulp.lpSum(block.num_bytes / limit_bytes * x for block, x in zip(blocks, kept, strict=True)) <= 1
    outcome = run(program, default_solver(), GAP, time_limit_seconds=TIME_LIMIT_SECONDS)
    found = [block for block, x in zip(blocks, kept, strict=True) if value_of(x) > 0.5] if outcome.found else []
    best = max(found, greedy, key=lambda own: sum(block.seconds for block in own))
    return {block.name for block in best}


def greedily_kept(blocks: Sequence[Block], limit_bytes: float) -> list[Block]:
    """Blocks that fit in so many bytes, those with most seconds saved by a byte first, or the one that saves most.

    Error: saves at least half as much as the best choice.
    """
    fitting = [block for block in blocks if block.seconds > 0 and block.num_bytes <= limit_bytes]
    chosen, free = list[Block](), limit_bytes
    for block in sorted(fitting, key=lambda own: own.num_bytes / own.seconds):
        if block.num_bytes <= free:
            chosen.append(block)
            free -= block.num_bytes
    largest = max(fitting, key=lambda own: own.seconds, default=None)
    if largest is not None and largest.seconds > sum(block.seconds for block in chosen):
        return [largest]
    return chosen
