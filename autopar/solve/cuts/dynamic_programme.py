"""Cuts that are intervals of the groups' order, by dynamic programming: fast, and exact for a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.hardware import Link
from autopar.solve.cuts.evaluate import load_matrix, objective_seconds, one_way_seconds, peak_bytes, stage_costs
from autopar.solve.cuts.intervals import Intervals, Matrix, interval_sums, intervals_of
from autopar.solve.cuts.problem import CutProblem, objective_of, update_seconds

# Points of the frontier between slowest stage and total time that are looked at, and their stages together: with few
# microbatches on many stages there are hundreds. ViT-L/16 on 8 stages has 3 points.
MAX_FRONTIER, MAX_FRONTIER_STAGES = 64, 512
# Times that the capacity is lowered by the excess of cuts that do not fit after all.
MAX_LOWERED = 4


@dataclass(frozen=True)
class StageTimes:
    """Time of every interval on one stage; infinite where forbidden."""

    stage_seconds: Matrix
    added_seconds: Matrix


@dataclass(frozen=True)
class StageIntervals:
    """Every interval of the groups as each stage of a problem: element [j, i] is about the groups i … j − 1.

    The best way to reach j is sought along a row, which takes half as long as along a column. Matrices are made one
    stage at a time, and kept where many stages share them: with 400 groups and 256 stages all of them together would
    take 1 GiB.
    """

    problem: CutProblem
    costs: Intervals
    _times: dict[tuple[Link | None, int], StageTimes]

    @cached_property
    def held_bytes(self) -> Matrix:
        """Bytes that each microbatch in flight holds."""
        return self.costs.saved_bytes + self.costs.received_bytes[None, :] + self.costs.sent_bytes[:, None]

    @cached_property
    def standing_bytes(self) -> Matrix:
        """Bytes that do not depend on the microbatches in flight, without the working set."""
        held = self.costs.weight_bytes
        if "tp" in self.problem.peers:
            held = held + self.costs.symmetric_bytes
        return held + self.problem.places * self.costs.incoming_bytes if self.problem.places else held

    def is_last(self, stage: int) -> bool:
        return stage == self.problem.stages - 1

    def memory_bytes(self, stage: int) -> Matrix:
        """Bytes of every interval on a stage; infinite where forbidden. The capacity is not applied.

        Error: low by gradients that wait for their bucket or have come in a step's one backward, by messages that the
            fullest rank has more of, and by gradients that several stages send for one tensor.
        """
        held = self.standing_bytes + self.costs.working.floor + self.problem.fixed_bytes(stage)
        held = held + self.problem.in_flight[stage] * self.held_bytes
        return np.where(np.isinf(self.times(stage).stage_seconds), np.inf, held)

    def times(self, stage: int) -> StageTimes:
        """Times of every interval on a stage."""
        # Pins differ from stage to stage; transfer times depend on the link alone.
        key = (None if self.is_last(stage) else self.problem.boundary[stage], stage if self.problem.pins else 0)
        if key not in self._times:
            self._times[key] = self._timed(stage, key[0])
        return self._times[key]

    def _timed(self, stage: int, link: Link | None) -> StageTimes:
        o = objective_of(self.problem)
        pairs = zip(self.costs.forward_bytes, self.costs.backward_bytes)
        transfer = np.array([sum(one_way_seconds(int(n), link) for n in pair) if link else 0.0 for pair in pairs])
        forbidden = self._forbidden(stage)
        seconds = load_matrix(self.problem) + o.transfer * transfer[:, None]
        added = o.total * seconds + o.traffic * transfer[:, None]
        return StageTimes(np.where(forbidden, np.inf, seconds), np.where(forbidden, np.inf, added))

    def _forbidden(self, stage: int) -> NDArray[np.bool_]:
        """Intervals that are empty, hold a group pinned elsewhere, or end with the model before the last stage."""
        size, loss = len(self.problem.cost.groups), self.problem.cost.loss
        pinned = interval_sums(size, ((1.0, (g,)) for g, s in self.problem.pins.items() if s != stage))
        real = interval_sums(size, ((1.0, (g,)) for g in range(loss)))
        forbidden = (real == 0) | (pinned > 0)
        if not self.is_last(stage):
            forbidden[size, :] = True
        return forbidden


def stage_intervals(problem: CutProblem) -> StageIntervals:
    """Time and memory of every interval on every stage."""
    return StageIntervals(problem, intervals_of(problem), {})


@dataclass(frozen=True)
class FeasibleIntervals:
    """Intervals that fit the capacity, by stage; an interval recomputes only if it does not fit otherwise.

    ``fits`` and ``fits_plain`` (without recomputation) have a matrix for each stage.
    """

    plain: StageIntervals
    recomputed: StageIntervals | None
    fits_plain: list[NDArray[np.bool_]]
    fits: list[NDArray[np.bool_]]

    def times(self, stage: int) -> StageTimes:
        """Times of every interval on a stage, also of those that do not fit."""
        once = self.plain.times(stage)
        if self.recomputed is None:
            return once
        again, chosen = self.recomputed.times(stage), self.fits_plain[stage]
        return StageTimes(
            np.where(chosen, once.stage_seconds, again.stage_seconds),
            np.where(chosen, once.added_seconds, again.added_seconds),
        )

    def at(self, stage: int, j: int, i: int) -> tuple[float, float]:
        """Stage and added seconds of one interval."""
        found = self.plain if self.recomputed is None or self.fits_plain[stage][j, i] else self.recomputed
        times = found.times(stage)
        return float(times.stage_seconds[j, i]), float(times.added_seconds[j, i])


def feasible_intervals(problem: CutProblem) -> FeasibleIntervals:
    """Intervals that fit on each stage. Stages of one rank share its capacity by their microbatches in flight."""
    capacity = np.inf if problem.capacity_bytes is None else float(problem.capacity_bytes)
    limit = [capacity * problem.capacity_share(s) for s in range(problem.stages)]
    once = stage_intervals(problem)
    at_once = [once.memory_bytes(s) <= limit[s] for s in range(problem.stages)]
    if not problem.may_recompute:
        return FeasibleIntervals(once, None, at_once, at_once)
    again = stage_intervals(problem.recomputing)
    fits = [own | (again.memory_bytes(s) <= limit[s]) for s, own in enumerate(at_once)]
    return FeasibleIntervals(once, again, at_once, fits)


def contiguous_cuts(problem: CutProblem) -> tuple[int, ...] | None:
    """The cheapest contiguous cuts within the capacity, or None where there are none.

    Error: exact for contiguous cuts, but the update's time only decides between the candidates that are looked at, and
        where the cuts found are over the capacity after all, it is lowered by their excess and the programme repeated;
        in the end cuts of least memory stand in.
        With several stages a rank, memory is not part of the programme: its answer without a limit is taken if it fits,
        otherwise the answer that keeps each stage within its share of the rank's capacity.
    """
    if problem.stages > problem.cost.loss:
        return None
    limit = problem.capacity_bytes
    if limit is None:
        return _cheapest(problem)
    if problem.chunks > 1:
        cuts = _cheapest(replace(problem, capacity_bytes=None))
        if cuts is not None and peak_bytes(problem, cuts) <= limit:
            return cuts
    lowered = limit
    for _ in range(MAX_LOWERED):
        cuts = _cheapest(replace(problem, capacity_bytes=lowered))
        if cuts is None:
            break
        excess = peak_bytes(problem, cuts) - limit
        if excess <= 0:
            return cuts
        lowered -= excess
    cuts = least_memory_cuts(problem)
    return cuts if cuts is not None and peak_bytes(problem, cuts) <= limit else None


def _cheapest(problem: CutProblem) -> tuple[int, ...] | None:
    """The cheapest contiguous cuts of which every stage fits by itself."""
    found = feasible_intervals(problem)

    def seconds(s: int) -> Matrix:
        return np.where(found.fits[s], found.times(s).stage_seconds, np.inf)

    balanced = _partition(problem.stages, seconds, np.maximum)
    if balanced is None:
        return None

    def total(cuts: tuple[int, ...]) -> float:
        return sum(found.at(s, j, i)[1] for s, (i, j) in enumerate(_pairs(cuts, problem)))

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(found.at(s, j, i)[0] for s, (i, j) in enumerate(_pairs(cuts, problem)))

    def below(ceiling: float) -> Callable[[int], Matrix]:
        def added(s: int) -> Matrix:
            times = found.times(s)
            return np.where(found.fits[s] & (times.stage_seconds < ceiling), times.added_seconds, np.inf)

        return added

    o = objective_of(problem)
    # Every solution pays this besides its total: the fastest slowest stage, and an even share of the update.
    update = o.optimizer * sum(map(update_seconds, problem.cost.weights)) / problem.pp
    floor = o.slowest * slowest(balanced) + update
    best, best_value = balanced, _value(problem, balanced)
    ceiling = np.inf
    for _ in range(max(4, min(MAX_FRONTIER, MAX_FRONTIER_STAGES // problem.stages))):
        cuts = _partition(problem.stages, below(ceiling), np.add)
        if cuts is None or floor + total(cuts) >= best_value:
            break
        value = _value(problem, cuts)
        if value < best_value:
            best, best_value = cuts, value
        # A slower slowest stage than this cannot be paid for by any saving in the total.
        affordable = (best_value - total(cuts) - update) / o.slowest if o.slowest else np.inf
        ceiling = min(slowest(cuts), affordable)
    return _stage_of(best, problem)


def least_memory_cuts(problem: CutProblem) -> tuple[int, ...] | None:
    """The contiguous cuts whose fullest stage is emptiest, or None where the pins allow none."""
    if problem.stages > problem.cost.loss:
        return None
    ways = [stage_intervals(own) for own in ([problem, problem.recomputing] if problem.may_recompute else [problem])]

    def memory_bytes(s: int) -> Matrix:
        return np.minimum.reduce([way.memory_bytes(s) for way in ways]) / problem.capacity_share(s)

    cuts = _partition(problem.stages, memory_bytes, np.maximum)
    return None if cuts is None else _stage_of(cuts, problem)


def _value(problem: CutProblem, cuts: tuple[int, ...]) -> float:
    return objective_seconds(problem, stage_costs(problem, _stage_of(cuts, problem)))


def _pairs(cuts: tuple[int, ...], problem: CutProblem) -> zip[tuple[int, int]]:
    return zip((0, *cuts), (*cuts, len(problem.cost.groups)))


def _stage_of(cuts: tuple[int, ...], problem: CutProblem) -> tuple[int, ...]:
    return tuple(s for s, (i, j) in enumerate(_pairs(cuts, problem)) for _ in range(i, j))


def _partition(
    stages: int, cost: Callable[[int], Matrix], combine: Callable[[Matrix, Matrix], Matrix]
) -> tuple[int, ...] | None:
    """Cuts with the least combined cost of their intervals, or None if it is infinite."""
    best = np.array([0.0])
    choices = []
    for stage in range(stages):
        matrix = cost(stage)
        best = np.pad(best, (0, matrix.shape[0] - len(best)), constant_values=np.inf)
        reached = combine(best[None, :], matrix)
        choice = reached.argmin(axis=1)
        best = reached[np.arange(len(choice)), choice]
        choices.append(choice)
    if not np.isfinite(best[-1]):
        return None
    cuts = [len(best) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:-1]))
