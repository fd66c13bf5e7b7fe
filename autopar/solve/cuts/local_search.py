"""Local search: moves cuts while the simulated step gets shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import chain, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from autopar.ir.microbatches import microbatch_factors
from autopar.ir.plan_parts import Balance
from autopar.solve.cuts.dynamic_programme import ROUNDING, contiguous_cuts
from autopar.solve.cuts.evaluate import fullest_bytes, is_contiguous, own_peak_costs
from autopar.solve.cuts.intervals import Matrix, Sums, Vector, exposed_seconds, intervals_of
from autopar.solve.cuts.problem import CutProblem
from autopar.solve.cuts.step_time import (
    Orders,
    Setting,
    hop_seconds,
    list_orders,
    pipeline_seconds,
    step_time_of,
    with_update,
)

# Other balances of the stages, from which the search starts too.
STARTS: tuple[Balance, ...] = ("params", "flops", "uniform")
# Shares of the capacity for which the dynamic programme cuts too where stages recompute: with more room it may prefer
# cuts from which the search ends further from the best.
TIGHTER = (0.97, 0.93, 0.88)
# Numbers of groups by which a cut moves: across a block, half of one, or one operation.
STRIDES = (8, 4, 2, 1)
FAR_STRIDES = (32, 16)
# The most cuts that are tried for one candidate, and the most actions that are simulated: half a second of one core.
MAX_TRIALS, MAX_ACTIONS = 250, 200_000
# After that share of its trials a search is given up whose step is not within `LEFT_TO_GAIN` of the best one known. Of
# 1,822 searches for the plans of 57 tests 8 that ended below the best would be, which gained 0.2 to 1.8 %.
FIRST_TRIALS, LEFT_TO_GAIN = 0.2, 1.02
# The most actions for which a local search makes orders of its trials' own: a second of one core. On more than
# `FEW_DEVICES`, where there are more meshes to search, an eighth.
FEW_DEVICES, MAX_LISTED, MAX_LISTED_ON_MANY = 8, 20_000, 2_500


def local_search(
    setting: Setting, problem: CutProblem, *known: tuple[int, ...], best_seconds: float = float("inf")
) -> tuple[int, ...]:
    """The best of some contiguous cuts moved while that shortens the simulated step, within the capacity.

    The closed form that the dynamic programme minimises knows stages by the slowest one and by their sum. Where a rank
    has several it also matters which of them is slow. Where stages recompute, the step jumps with the number of their
    segments that do: cuts are then moved further too, to the other side of such a jump.

    Args:
        best_seconds: the best step known, of any problem; see `is_given_up`.
    """
    if problem.balance != "time":
        return known[0]
    others = [replace(problem, capacity_bytes=None, balance=balance) for balance in STARTS]
    if problem.capacity_bytes is not None and recomputes(problem, known[0]):
        others += [replace(problem, capacity_bytes=int(share * problem.capacity_bytes)) for share in TIGHTER]
    starts = [cuts_of(units) for units in (*known, *map(contiguous_cuts, others)) if units is not None]
    tried: dict[tuple[int, ...], float] = {}
    orders: dict[tuple[int, ...], Orders] = {}
    size, actions = len(known[0]), 2 * problem.stages * problem.microbatches
    most = MAX_LISTED if problem.mesh.devices <= FEW_DEVICES else MAX_LISTED_ON_MANY
    listed = max(1, most // actions) if problem.schedule == "searched" else float("inf")

    def seconds(cuts: tuple[int, ...], ceiling: float = float("inf")) -> float:
        if cuts not in tried:
            step = 0.0
            if len(tried) >= listed:  # in the best ones' order first: to search one takes longer
                best = min(tried, key=tried.__getitem__)
                if best not in orders:
                    orders[best] = orders_at(setting, problem, stages_of(best, size))
                step = step_seconds(setting, problem, cuts, ceiling, orders[best])
            if step < ceiling:
                step = step_seconds(setting, problem, cuts, ceiling)
            tried[cuts] = step
        return tried[cuts]

    best = min(starts, key=seconds)
    trials = min(MAX_TRIALS, max(4 * problem.stages, MAX_ACTIONS // actions))
    best = moved(best, seconds, tried, int(FIRST_TRIALS * trials))
    if is_given_up(seconds(best), best_seconds):
        return stages_of(best, size)
    best = moved(best, seconds, tried, trials)
    if recomputes(problem, stages_of(best, size)):
        best = moved(best, seconds, tried, len(tried) + trials, (*FAR_STRIDES, *STRIDES))
    return stages_of(best, size)


def is_given_up(seconds: float, best_seconds: float) -> bool:
    """Whether cuts with that step are not moved further, as the best step known is too far off."""
    return seconds > LEFT_TO_GAIN * best_seconds


def recomputes(problem: CutProblem, stage_of: Sequence[int]) -> bool:
    """Whether the capacity has any stage recompute."""
    return problem.may_recompute and any(c.recomputed_below for c in own_peak_costs(problem, stage_of))


def moved(
    cuts: tuple[int, ...],
    seconds: Callable[[tuple[int, ...], float], float],
    tried: Sized,
    most: int,
    strides: Sequence[int] = STRIDES,
) -> tuple[int, ...]:
    """Cuts moved while that shortens the step, until so many were tried.

    Args:
        seconds: step of some cuts, infinite if it is no shorter than a ceiling.
        tried: cuts of which ``seconds`` was asked for.
    """
    shortest, improved = seconds(cuts, float("inf")), True
    while improved and len(tried) < most:
        improved = False
        for other in neighbours(cuts, strides):
            if len(tried) < most and (step := seconds(other, shortest)) < shortest:
                cuts, shortest, improved = other, step, True
                break
    return cuts


def neighbours(cuts: tuple[int, ...], strides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The cuts with one of them moved, or two neighbours, or more, all by as much."""
    for stride in strides:
        for length in range(1, len(cuts) + 1):
            for i in range(len(cuts) - length + 1):
                for by in (-stride, stride):
                    yield (*cuts[:i], *(cut + by for cut in cuts[i : i + length]), *cuts[i + length :])


def orders_at(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> Orders:
    """Orders of actions for some cuts, if nothing is recomputed."""
    forward, backward, wgrad = passes_at(problem, stage_of)
    return list_orders(problem, forward, backward, wgrad, hop_seconds(setting, problem, stage_of))


def step_seconds(
    setting: Setting, problem: CutProblem, cuts: tuple[int, ...], ceiling: float, orders: Orders | None = None
) -> float:
    """Seconds of the simulated step; infinite if a stage is empty, a pin violated, a rank too full, or the step is
    proven to be no shorter than the ceiling.

    Args:
        orders: of a searched schedule. Default: those for these cuts.
    """
    edges = (0, *cuts, problem.cost.loss)  # what follows the loss is on the last stage
    if any(low >= high for low, high in pairwise(edges)):
        return float("inf")
    units = stages_of(cuts, len(problem.cost.groups))
    if any(units[group] != stage for group, stage in problem.pins.items()):
        return float("inf")
    if busy_seconds(setting, problem, units) * (1 - ROUNDING) >= ceiling:
        return float("inf")
    pipeline = pipeline_seconds(setting, problem, units, *passes_at(problem, units), orders)
    # Sums over intervals count weights twice that stages of a rank share.
    update = update_floor_seconds(problem, units) if is_contiguous(problem, units) else 0.0
    if (pipeline + update) * (1 - ROUNDING) >= ceiling:
        return float("inf")
    costs = own_peak_costs(problem, units)
    if problem.capacity_bytes is not None and fullest_bytes(problem, costs) > problem.capacity_bytes:
        return float("inf")
    if problem.may_recompute and any(c.recomputed_below for c in costs):
        return step_time_of(setting, problem, units, costs).seconds
    return with_update(setting, problem, units, costs, pipeline).seconds


def passes_at(problem: CutProblem, stage_of: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """The stages' seconds of a forward, a backward, and its gradients of weights, if nothing is recomputed."""
    intervals, at = intervals_of(problem), ends_and_begins(problem, stage_of)
    passes = (intervals.forward_seconds, intervals.backward_seconds, intervals.wgrad_seconds)
    forward, backward, wgrad = (seconds[at].tolist() for seconds in passes)
    return forward, backward, wgrad


def busy_seconds(setting: Setting, problem: CutProblem, stage_of: Sequence[int]) -> float:
    """A lower bound of the simulated step of contiguous cuts: an even share of the update after the rank that is busy
    longest, with the forwards before its first one and, if they are whole, the backwards after its last one. Nothing is
    recomputed."""
    intervals, at = intervals_of(problem), ends_and_begins(problem, stage_of)
    forward, backward = intervals.forward_seconds[at], intervals.backward_seconds[at]
    sizes = microbatch_factors(setting.constraints.batch // problem.replicas.dp, problem.microbatches)
    weights = problem.cost.weights
    update = problem.cost.remember("update", lambda: sum(w.optimizer_seconds + w.contention_seconds for w in weights))
    busy = sum(sizes) * by_rank(problem, forward + backward)
    around = sizes[0] * forward + (0.0 if problem.is_split else sizes[-1] * backward)
    busy[1:] += around[: problem.pp - 1].cumsum()
    return float(busy.max()) + update / problem.pp


def update_floor_seconds(problem: CutProblem, stage_of: Sequence[int]) -> float:
    """A lower bound of the longest update after the pipeline, whatever recomputation hides of it."""
    intervals, at = intervals_of(problem), ends_and_begins(problem, stage_of)

    def total(amounts: Sums | Matrix) -> Vector:
        return by_rank(problem, amounts[at])

    hidden = total(intervals.backward_seconds) + (np.inf if problem.may_recompute else 0.0)
    exposed = exposed_seconds(intervals, hidden, total(intervals.forward_seconds), total)
    update = (total(intervals.weight_sums(name)) for name in ("contention_seconds", "optimizer_seconds"))
    return float(sum(update, exposed).max())


def ends_and_begins(problem: CutProblem, stage_of: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of the stages' intervals in matrices of them."""
    cuts = np.searchsorted(stage_of, np.arange(problem.stages + 1))
    return cuts[1:], cuts[:-1]


def by_rank(problem: CutProblem, amounts: Vector) -> Vector:
    """Sums of the stages' amounts at each position."""
    return amounts[problem.placement.rounds].sum(axis=0)


def cuts_of(units: Sequence[int]) -> tuple[int, ...]:
    """First unit of each stage after the first."""
    return tuple(i for i in range(1, len(units)) if units[i] != units[i - 1])


def stages_of(cuts: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The stage of each of so many units; inverse of `cuts_of`."""
    return tuple(chain.from_iterable(repeat(s, high - low) for s, (low, high) in enumerate(pairwise((0, *cuts, size)))))
