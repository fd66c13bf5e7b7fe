"""Cuts for several stages a rank, improved by what the simulated step says, and how good they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.ir import Balance, SolverInfo
from autopar.solve.assemble import Decision, Setting, step_time
from autopar.solve.candidates import point_of, step_floor
from autopar.solve.contiguous import contiguous_cuts
from autopar.solve.cuts import SOLVER_TOLERANCE
from autopar.solve.evaluate import fullest_bytes, stage_costs
from autopar.solve.merge import merge
from autopar.solve.problem import CutProblem

# Other balances of the stages, from which the search starts too.
STARTS: tuple[Balance, ...] = ("params", "flops", "uniform")
# By how many groups a cut is moved at once: across a block, half of one, or one operation.
STRIDES = (8, 4, 2, 1)
# The most actions that are simulated: about two seconds of one core.
MAX_ACTIONS = 1_000_000


def polished(setting: Setting, decision: Decision) -> Decision:
    """The decision with cuts moved while that shortens its simulated step, within the capacity; contiguous cuts only.

    The closed form that the dynamic programme minimises knows stages by the slowest one and by their sum. Where a rank
    has several it also matters which of them is slow.
    """
    merged = merge(decision.problem)
    problem = merged.problem
    if problem.balance != "time":
        return decision
    own = {u: s for u, s in zip(merged.unit_of, decision.stage_of)}
    others = (contiguous_cuts(replace(problem, balance=balance, capacity_bytes=None)) for balance in STARTS)
    starts = [cuts_of([own[u] for u in range(len(own))]), *(cuts_of(units) for units in others if units is not None)]
    known: dict[tuple[int, ...], float] = {}

    def seconds(cuts: tuple[int, ...]) -> float:
        if cuts not in known:
            known[cuts] = step_seconds(setting, problem, cuts)
        return known[cuts]

    best = min(starts, key=seconds)
    trials = max(len(starts) + 2 * problem.stages, MAX_ACTIONS // (2 * problem.stages * problem.microbatches))
    improved = True
    while improved and len(known) < trials:
        improved = False
        for cuts in moved(best):
            if len(known) < trials and seconds(cuts) < seconds(best):
                best, improved = cuts, True
                break
    return replace(decision, stage_of=merged.expand(stages_of(best, len(own))))


def moved(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The cuts with one of them, or it and all later ones, moved."""
    for stride in STRIDES:
        for i in range(len(cuts)):
            for by in (-stride, stride):
                yield (*cuts[:i], cuts[i] + by, *cuts[i + 1 :])
                yield (*cuts[:i], *(cut + by for cut in cuts[i:]))


def step_seconds(setting: Setting, problem: CutProblem, cuts: tuple[int, ...]) -> float:
    """Of the simulated step; infinite where a stage is empty, a pin is not kept, or a rank is too full."""
    edges = (0, *cuts, problem.cost.loss)  # what follows the loss is on the last stage
    if any(low >= high for low, high in pairwise(edges)):
        return float("inf")
    units = stages_of(cuts, len(problem.cost.groups))
    if any(units[group] != stage for group, stage in problem.pins.items()):
        return float("inf")
    if problem.capacity_bytes is not None:
        if fullest_bytes(problem, stage_costs(problem, units)) > problem.capacity_bytes:
            return float("inf")
    return step_time(setting, problem, units).seconds


def cuts_of(units: Sequence[int]) -> tuple[int, ...]:
    """Where the stages after the first begin."""
    return tuple(i for i in range(1, len(units)) if units[i] != units[i - 1])


def stages_of(cuts: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The stage of each of so many units; inverse of `cuts_of`."""
    return tuple(s for s, (low, high) in enumerate(pairwise((0, *cuts, size))) for _ in range(low, high))


def certified_step(setting: Setting, decision: Decision) -> SolverInfo:
    """How far the simulated step is above one of even stages: compute, bubble and update in even shares, no transfers.

    Error: not a proof for unequal stages, of which shorter ones at both ends of the pipeline can have less of a bubble.
    """
    problem = decision.problem
    seconds = step_time(setting, problem, decision.stage_of).seconds
    bound = min(seconds, step_floor(setting, point_of(decision), decision.priced))
    gap = (seconds - bound) / seconds if seconds else 0.0
    status = "optimal" if gap <= problem.gap + SOLVER_TOLERANCE else "contiguous cuts"
    method = "shardings then cuts" if problem.tp > 1 else "cuts"
    return SolverInfo("dynamic programme", status, gap, 0.0, problem.balance, method)
