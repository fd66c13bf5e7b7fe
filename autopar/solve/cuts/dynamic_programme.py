"""Cuts that are intervals of the groups' order, by dynamic programming: fast, and exact for a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.hardware import Link
from autopar.solve.cuts.evaluate import (
    is_contiguous,
    load_sums,
    objective_seconds,
    one_way_seconds,
    own_peak_costs,
    peak_bytes,
)
from autopar.solve.cuts.intervals import Intervals, Matrix, Sums, Vector, intervals_of
from autopar.solve.cuts.problem import CutProblem, group_loads, objective_of, update_seconds

# Points of the frontier between slowest stage and total time that are looked at, and their stages together: with few
# microbatches on many stages there are hundreds. ViT-L/16 on 8 stages has 3 points.
MAX_FRONTIER, MAX_FRONTIER_STAGES = 64, 512
# Slowest stage, as a multiple of an even share, up to which the fastest one is sought first.
FIRST_CEILING = 1.25
# Slack for rounding in sums of seconds, relative.
ROUNDING = 1e-9
# Levels of recomputation that it knows, of the model's segments; what a stage recomputes is decided afterwards.
MAX_LEVELS = 8
# Times that the capacity is lowered by the excess of cuts that do not fit after all.
MAX_LOWERED = 4


# Cuts where an interval may end, and where it may begin: rows and columns of a matrix of intervals.
Window = tuple[slice, slice]


@dataclass(frozen=True)
class StageTimes:
    """Time of the intervals of a window on one stage, infinite where forbidden; or of an interval on each stage."""

    stage_seconds: Matrix
    added_seconds: Matrix


@dataclass(frozen=True)
class Reach:
    """The first and last end of an allowed interval from each cut, and its first and last begin to each cut. First of
    none: the number of cuts, last: −1."""

    first_end: NDArray[np.int64]
    last_end: NDArray[np.int64]
    first_begin: NDArray[np.int64]
    last_begin: NDArray[np.int64]


@dataclass(frozen=True)
class StageIntervals:
    """Every interval of the groups as each stage of a problem: element [j, i] is about the groups i … j − 1.

    The best way to reach j is sought along a row, which takes half as long as along a column. Bytes that all stages
    share are kept, and the rest made of a window of cuts: with 400 groups and 256 stages all matrices together would
    take 1 GiB.
    """

    problem: CutProblem
    costs: Intervals

    @cached_property
    def held_bytes(self) -> Matrix:
        """Bytes that each microbatch in flight holds."""
        received = self.problem.kept_received * self.costs.messages.forward_bytes
        return self.problem.cost.remember(
            ("held", *self.problem.interval_key),
            lambda: self.costs.saved_bytes + received[None, :] + self.costs.sent_bytes[:, None],
        )

    @cached_property
    def standing_bytes(self) -> Matrix:
        """Bytes that do not depend on the microbatches in flight, without the working set."""
        held = self.costs.weight_bytes
        if "tp" in self.problem.peers:
            held = held + self.costs.symmetric_bytes
        return held + self.problem.places * self.costs.messages.incoming_bytes if self.problem.places else held

    def is_last(self, stage: int) -> bool:
        return stage == self.problem.stages - 1

    def memory_bytes(self, stage: int, window: Window) -> Matrix:
        """Bytes of the intervals of a window on a stage, forbidden ones too. The capacity is not applied.

        Error: low by gradients that wait for their bucket or have come in a step's one backward, by messages that the
            fullest rank has more of, and by gradients that several stages send for one tensor.
        """
        held = self.problem.in_flight[stage] * self.held_bytes[window] + self.costs.working.floor[window]
        return held + self.standing_bytes[window] + self.problem.fixed_bytes(stage)

    def times(self, stage: int, window: Window) -> StageTimes:
        """Times of the intervals of a window on a stage."""
        o, (ends, begins) = objective_of(self.problem), window
        transfer = self.transfer_seconds(stage)[ends, None]
        seconds = load_sums(self.problem).within(window) + o.transfer * transfer
        added = o.total * seconds + o.traffic * transfer
        forbidden = self._forbidden(stage, ends, begins)
        seconds[forbidden] = added[forbidden] = np.inf
        return StageTimes(seconds, added)

    def of_cuts(self, cuts: tuple[int, ...]) -> StageTimes:
        """Times of each stage under some cuts, as vectors."""
        o, (begins, ends) = objective_of(self.problem), np.array([*_pairs(cuts, self.problem)]).T
        transfer = np.array([self.transfer_seconds(s)[end] for s, end in enumerate(ends)])
        seconds = load_sums(self.problem)[ends, begins] + o.transfer * transfer
        return StageTimes(seconds, o.total * seconds + o.traffic * transfer)

    def transfer_seconds(self, stage: int) -> Vector:
        """Time of the messages at the end of a stage, by the cut where it ends."""
        link = None if self.is_last(stage) else self.problem.boundary[stage]

        def made() -> Vector:
            pairs = zip(self.costs.messages.forward_bytes, self.costs.messages.backward_bytes)
            return np.array([sum(one_way_seconds(int(n), link) for n in pair) if link else 0.0 for pair in pairs])

        return self.problem.cost.remember(("transfer seconds", link), made)

    def _forbidden(self, stage: int, ends: slice, begins: slice) -> NDArray[np.bool_]:
        """Intervals of a window that are empty, hold a group pinned elsewhere, or end with the model before the last
        stage."""
        size, loss = len(self.problem.cost.groups), self.problem.cost.loss
        cuts = np.arange(size + 1)
        end, begin = cuts[ends, None], cuts[None, begins]
        forbidden = (begin >= end) | (begin >= loss)  # the loss alone is no stage
        if self.problem.pins:
            pinned = [float(self.problem.pins.get(g, stage) != stage) for g in range(size)]
            forbidden |= Sums.of(pinned).within((ends, begins)) > 0
        if not self.is_last(stage):
            forbidden |= end == size
        return forbidden

    def reach(self, stage: int, ceiling: float) -> Reach:
        """Reach of the intervals that take at most as long as a ceiling on a stage, whether they fit or not."""
        problem, transfer = self.problem, objective_of(self.problem).transfer * self.transfer_seconds(stage)
        until, size, loss = load_sums(problem).until, len(problem.cost.groups), problem.cost.loss
        cuts = np.arange(size + 1)
        limit = np.minimum(cuts, loss)  # an interval to each cut begins before it
        if not self.is_last(stage):
            limit[size] = 0
        # Later begins leave less, so that each cut has a first begin, and all up to the limit are allowed.
        low = np.zeros(size + 1, dtype=np.int64)
        for group in (g for g, s in problem.pins.items() if s != stage):
            low[group + 1 :] = np.maximum(low[group + 1 :], group + 1)
        low, high = np.minimum(low, limit), limit.copy()
        while (undecided := low < high).any():
            middle = (low + high) // 2
            short = until - until[middle] + transfer <= ceiling
            high = np.where(undecided & short, middle, high)
            low = np.where(undecided & ~short, middle + 1, low)
        first_begin = np.where(low < limit, low, size + 1)
        earliest = np.minimum.accumulate(first_begin[::-1])[::-1]  # first begin to any later end
        last_end = np.searchsorted(earliest, cuts, side="right") - 1
        last_end = np.where((last_end > cuts) & (cuts < loss), last_end, -1)
        first_end, sought, end = np.full(size + 1, size + 1), cuts[last_end >= 0], 1
        while len(sought):
            found = first_begin[sought + end] <= sought
            first_end[sought[found]] = sought[found] + end
            sought, end = sought[~found], end + 1
        return Reach(first_end, last_end, first_begin, np.where(low < limit, limit - 1, -1))


def stage_intervals(problem: CutProblem) -> StageIntervals:
    """Time and memory of every interval on every stage."""
    return StageIntervals(problem, intervals_of(problem))


@dataclass(frozen=True)
class FeasibleIntervals:
    """Intervals that fit the capacity, by stage; an interval recomputes only as much as it takes to fit.

    Args:
        ways: without recomputation, and with ever more of it.
    """

    ways: Sequence[StageIntervals]

    @property
    def plain(self) -> StageIntervals:
        return self.ways[0]

    def fits(self, ways: StageIntervals, stage: int, window: Window) -> NDArray[np.bool_]:
        """Whether the intervals of a window fit on a stage that recomputes or not. Stages of one rank share its
        capacity by their microbatches in flight."""
        problem = self.plain.problem
        capacity = np.inf if problem.capacity_bytes is None else float(problem.capacity_bytes)
        return ways.memory_bytes(stage, window) <= capacity * problem.capacity_share(stage)

    def times(self, stage: int, window: Window) -> StageTimes:
        """Times of the intervals of a window on a stage; infinite where they do not fit."""
        found, problem = self.plain.times(stage, window), self.plain.problem
        if problem.capacity_bytes is None:
            return found
        fits = self.fits(self.plain, stage, window)
        for way in self.ways[1:]:
            if fits.all():
                break
            more = self.fits(way, stage, window) & ~fits
            again = more * way.costs.recompute_seconds.within(window) * (problem.balance == "time")
            found = StageTimes(found.stage_seconds + again, found.added_seconds + objective_of(problem).total * again)
            fits |= more
        return StageTimes(np.where(fits, found.stage_seconds, np.inf), np.where(fits, found.added_seconds, np.inf))

    def of_cuts(self, cuts: tuple[int, ...]) -> StageTimes:
        """Times of each stage under cuts that fit, as vectors."""
        problem = self.plain.problem
        if len(self.ways) == 1:
            return self.plain.of_cuts(cuts)
        windows = [(slice(j, j + 1), slice(i, i + 1)) for i, j in _pairs(cuts, problem)]
        times = [self.times(s, window) for s, window in enumerate(windows)]
        return StageTimes(
            np.array([t.stage_seconds[0, 0] for t in times]), np.array([t.added_seconds[0, 0] for t in times])
        )

    def windows(self, ceiling: float) -> list[Window]:
        """For each stage, a window of cuts that holds all intervals on paths whose stages take at most as long as a
        ceiling."""
        problem = self.plain.problem
        stages, size = problem.stages, len(problem.cost.groups)
        reaches: dict[tuple[Link | None, int], Reach] = {}
        by_stage = []
        for s in range(stages):
            key = (None if self.plain.is_last(s) else problem.boundary[s], s if problem.pins else 0)
            if key not in reaches:
                reaches[key] = self.plain.reach(s, ceiling)
            by_stage.append(reaches[key])
        low, high = [0] * (stages + 1), [0] * stages + [size]
        for s in range(stages):
            inside = slice(low[s], high[s] + 1)
            low[s + 1], high[s + 1] = (
                int(by_stage[s].first_end[inside].min(initial=size)),
                int(by_stage[s].last_end[inside].max(initial=0)),
            )
        low[stages] = high[stages] = size
        for s in reversed(range(stages)):
            inside = slice(low[s + 1], high[s + 1] + 1)
            low[s] = max(low[s], int(by_stage[s].first_begin[inside].min(initial=size)))
            high[s] = min(high[s], int(by_stage[s].last_begin[inside].max(initial=0)))
        return [(slice(low[s + 1], high[s + 1] + 1), slice(low[s], high[s] + 1)) for s in range(stages)]


def feasible_intervals(problem: CutProblem) -> FeasibleIntervals:
    """Intervals that fit on each stage."""
    ways = [problem]
    if problem.may_recompute:
        segments = problem.cost.segments
        step = -(-len(segments) // MAX_LEVELS) or 1
        ways += [problem.recomputing_below(bound) for bound in segments[step::step]] + [problem.recomputing]
    return FeasibleIntervals([stage_intervals(way) for way in ways])


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
    if problem.stages == 1:
        whole = _stage_of((), problem)
        return whole if limit is None or peak_bytes(problem, whole) <= limit else None
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
    if problem.capacity_bytes is not None:
        return _cheapest_found(problem)
    # Without a limit, they are the same under all schedules.
    key = ("cheapest", problem.balance, objective_of(problem), problem.pp, problem.boundary, *problem.pins.items())
    return problem.cost.remember(key, lambda: _cheapest_found(problem))


def _cheapest_found(problem: CutProblem) -> tuple[int, ...] | None:
    """As `_cheapest`, without a cache."""
    found = feasible_intervals(problem)
    balanced = _balanced(found)
    if balanced is None:
        return None

    def total(cuts: tuple[int, ...]) -> float:
        return sum(found.of_cuts(cuts).added_seconds.tolist())

    def added(ceiling: float) -> Callable[[int, Window], Matrix]:
        def of(s: int, window: Window) -> Matrix:
            times = found.times(s, window)
            return np.where(times.stage_seconds < ceiling, times.added_seconds, np.inf)

        return of

    o = objective_of(problem)
    # Every solution pays this besides its total: the fastest slowest stage, and an even share of the update.
    update = o.optimizer * sum(map(update_seconds, problem.cost.weights)) / problem.pp
    floor = o.slowest * slowest(found, balanced) + update
    best, best_value = balanced, _value(problem, balanced)
    work = o.total * sum(group_loads(problem.cost, problem.balance))
    ceiling = (best_value - work - update) / o.slowest * (1 + ROUNDING) if o.slowest else np.inf
    for _ in range(max(4, min(MAX_FRONTIER, MAX_FRONTIER_STAGES // problem.stages))):
        cuts = _partition(found.windows(ceiling), added(ceiling), np.add)
        if cuts is None or floor + total(cuts) >= best_value:
            break
        value = _value(problem, cuts)
        if value < best_value:
            best, best_value = cuts, value
        # A slower slowest stage than this cannot be paid for by any saving in the total.
        affordable = (best_value - total(cuts) - update) / o.slowest if o.slowest else np.inf
        ceiling = min(slowest(found, cuts), affordable)
    return _stage_of(best, problem)


def slowest(found: FeasibleIntervals, cuts: tuple[int, ...]) -> float:
    """Seconds of the slowest stage under some cuts."""
    return float(found.of_cuts(cuts).stage_seconds.max())


def _balanced(found: FeasibleIntervals) -> tuple[int, ...] | None:
    """The cuts whose slowest stage is fastest, or None where there are none.

    They are sought among those within a ceiling, which is raised while there are none.
    """
    problem = found.plain.problem
    loads = group_loads(problem.cost, problem.balance)
    ceiling = FIRST_CEILING * max(sum(loads) / problem.stages, *loads)
    for wide in (ceiling, FIRST_CEILING * ceiling, np.inf):
        cuts = _partition(found.windows(wide), lambda s, window: found.times(s, window).stage_seconds, np.maximum)
        if cuts is not None and slowest(found, cuts) <= wide:
            return cuts
    return None


def least_memory_cuts(problem: CutProblem) -> tuple[int, ...] | None:
    """The contiguous cuts whose fullest stage is emptiest, or None where the pins allow none."""
    if problem.stages > problem.cost.loss:
        return None
    if problem.stages == 1:
        return _stage_of((), problem)
    ways = [stage_intervals(own) for own in ([problem, problem.recomputing] if problem.may_recompute else [problem])]

    def memory_bytes(s: int, window: Window) -> Matrix:
        least = np.minimum.reduce([way.memory_bytes(s, window) for way in ways]) / problem.capacity_share(s)
        return np.where(np.isinf(ways[0].times(s, window).stage_seconds), np.inf, least)

    cuts = _partition(FeasibleIntervals(ways[:1]).windows(np.inf), memory_bytes, np.maximum)
    return None if cuts is None else _stage_of(cuts, problem)


def _value(problem: CutProblem, cuts: tuple[int, ...]) -> float:
    """The objective at some cuts."""
    stage_of, o = _stage_of(cuts, problem), objective_of(problem)
    if problem.may_recompute or not is_contiguous(problem, stage_of):
        return objective_seconds(problem, own_peak_costs(problem, stage_of))
    # Without the memory, which takes longest.
    times, costs = stage_intervals(problem).of_cuts(cuts), intervals_of(problem)
    begins, ends = np.array([*_pairs(cuts, problem)]).T
    amounts = ("optimizer_seconds", "reduce_seconds", "gather_seconds")
    update = sum(costs.weight_sums(amount)[ends, begins] for amount in amounts)
    by_rank = np.asarray(update)[problem.placement.rounds].sum(axis=0)
    added = sum(times.added_seconds.tolist())
    return o.slowest * float(times.stage_seconds.max()) + added + o.optimizer * float(by_rank.max())


def _pairs(cuts: tuple[int, ...], problem: CutProblem) -> zip[tuple[int, int]]:
    return zip((0, *cuts), (*cuts, len(problem.cost.groups)))


def _stage_of(cuts: tuple[int, ...], problem: CutProblem) -> tuple[int, ...]:
    return tuple(s for s, (i, j) in enumerate(_pairs(cuts, problem)) for _ in range(i, j))


def _partition(
    windows: Sequence[Window],
    cost: Callable[[int, Window], Matrix],
    combine: Callable[[Matrix, Matrix], Matrix],
) -> tuple[int, ...] | None:
    """Cuts with the least combined cost of their intervals, or None if it is infinite.

    Args:
        windows: for each stage, the cuts where it may end and begin; it begins where the stage before may end.
        cost: of the intervals of a window on a stage.
    """
    best = np.array([0.0])
    choices = []
    for stage, window in enumerate(windows):
        if any(cuts.start >= cuts.stop for cuts in window):
            return None
        reached = combine(best[None, :], cost(stage, window))
        choice = reached.argmin(axis=1)
        best = reached[np.arange(len(choice)), choice]
        choices.append(choice)
    if not np.isfinite(best[-1]):
        return None
    cuts = [windows[-1][0].start]
    for (ends, begins), choice in zip(reversed(windows), reversed(choices)):
        cuts.append(begins.start + int(choice[cuts[-1] - ends.start]))
    return tuple(reversed(cuts[1:-1]))
