"""Cuts that are intervals of the groups' order, by dynamic programming: fast, and exact for a chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solve.evaluate import objective_seconds, one_way_seconds, stage_costs
from autopar.solve.problem import CutProblem, group_loads, objective_of

Matrix = NDArray[np.float64]

# Points of the frontier between slowest stage and total time that are looked at. ViT-L/16 on 8 stages has 3.
MAX_FRONTIER = 64


@dataclass(frozen=True)
class Intervals:
    """Cost of every stage s if it ran the groups i … j − 1: element [i, j] of its matrix, infinite where forbidden."""

    stage_seconds: tuple[Matrix, ...]
    added_seconds: tuple[Matrix, ...]
    memory_bytes: tuple[Matrix, ...]


def interval_sums(size: int, holdings: Iterable[tuple[float, Sequence[int]]]) -> Matrix:
    """Element [i, j]: the amounts of all holdings (amount, groups) with a group in i … j − 1, each once."""
    corners = np.zeros((size + 2, size + 2))
    for amount, groups in holdings:
        previous = -1
        for group in sorted(groups):
            # Counted by the first of its groups in the interval: previous < i <= group < j.
            corners[previous + 1, group + 1] += amount
            corners[group + 1, group + 1] -= amount
            previous = group
    return corners.cumsum(axis=0).cumsum(axis=1)[: size + 1, : size + 1]


def intervals_of(problem: CutProblem) -> Intervals:
    """Time and memory of every interval on every stage; the capacity is not applied."""
    cost, size = problem.cost, len(problem.cost.groups)
    forward, backward = np.zeros(size + 1), np.zeros(size + 1)
    for flow in cost.flows:
        crossed = slice(flow.producer + 1, max(flow.consumers) + 1)
        forward[crossed] += flow.num_bytes
        backward[crossed] += flow.num_bytes * flow.requires_grad
    load = interval_sums(size, ((x, (g,)) for g, x in enumerate(group_loads(cost, problem.balance))))
    weights = interval_sums(size, ((w.num_bytes, w.groups) for w in cost.weights))
    saved = interval_sums(size, ((a.num_bytes, a.groups) for a in cost.saved))
    saved += interval_sums(size, ((g.saved_bytes, (i,)) for i, g in enumerate(cost.groups)))
    transient = np.zeros((size + 1, size + 1))
    for i in range(size):
        transient[i, i + 1 :] = np.maximum.accumulate([g.transient_bytes for g in cost.groups[i:]])
    o = objective_of(problem)
    seconds, added, memory = [], [], []
    for s in range(problem.stages):
        last = s == problem.stages - 1
        transfer = np.array([0.0 if last else sum(one_way_seconds(int(n), problem.boundary[s]) for n in pair)
                             for pair in zip(forward, backward)])  # fmt: skip
        forbidden = _forbidden(problem, s)
        stage = load + o.transfer * transfer
        seconds.append(np.where(forbidden, np.inf, stage))
        added.append(np.where(forbidden, np.inf, o.total * stage + o.traffic * transfer))
        held = weights + problem.in_flight[s] * (saved + forward[:, None]) + transient
        memory.append(np.where(forbidden, np.inf, held))
    return Intervals(tuple(seconds), tuple(added), tuple(memory))


def _forbidden(problem: CutProblem, stage: int) -> NDArray[np.bool_]:
    """Intervals that are empty, hold a group pinned elsewhere, or end with the model before the last stage."""
    size = len(problem.cost.groups)
    pinned = interval_sums(size, ((1.0, (g,)) for g, s in problem.pins.items() if s != stage))
    real = interval_sums(size, ((1.0, (g,)) for g in range(problem.cost.loss)))
    forbidden = (real == 0) | (pinned > 0)
    if stage < problem.stages - 1:
        forbidden[:, size] = True
    return forbidden


def contiguous_cuts(problem: CutProblem) -> tuple[int, ...] | None:
    """The cheapest contiguous cuts within the capacity, or None where there are none.

    Error: exact for contiguous cuts, but the optimizer's time only decides between the candidates that are looked at.
    """
    found = intervals_of(problem)
    limit = np.inf if problem.capacity_bytes is None else float(problem.capacity_bytes)
    fits = [m <= limit for m in found.memory_bytes]
    seconds = [np.where(ok, t, np.inf) for ok, t in zip(fits, found.stage_seconds)]
    added = [np.where(ok, c, np.inf) for ok, c in zip(fits, found.added_seconds)]
    balanced = _partition(seconds, np.maximum)
    if balanced is None:
        return None

    def total(cuts: tuple[int, ...]) -> float:
        return sum(float(added[s][i, j]) for s, (i, j) in enumerate(_pairs(cuts, problem)))

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(float(seconds[s][i, j]) for s, (i, j) in enumerate(_pairs(cuts, problem)))

    o = objective_of(problem)
    # What every solution pays beside its total: the fastest slowest stage, an even share of the optimizer.
    optimizer = o.optimizer * sum(w.optimizer_seconds for w in problem.cost.weights) / problem.stages
    floor = o.slowest * slowest(balanced) + optimizer
    best, best_value = balanced, _value(problem, balanced)
    ceiling = np.inf
    for _ in range(MAX_FRONTIER):
        cuts = _partition([np.where(t < ceiling, c, np.inf) for t, c in zip(seconds, added)], np.add)
        if cuts is None or floor + total(cuts) >= best_value:
            break
        value = _value(problem, cuts)
        if value < best_value:
            best, best_value = cuts, value
        # A slower slowest stage than this cannot be paid for by any saving in the total.
        affordable = (best_value - total(cuts) - optimizer) / o.slowest if o.slowest else np.inf
        ceiling = min(slowest(cuts), affordable)
    return _stage_of(best, problem)


def least_memory_cuts(problem: CutProblem) -> tuple[int, ...] | None:
    """The contiguous cuts whose fullest stage is emptiest, or None where the pins allow none."""
    cuts = _partition(intervals_of(problem).memory_bytes, np.maximum)
    return None if cuts is None else _stage_of(cuts, problem)


def _value(problem: CutProblem, cuts: tuple[int, ...]) -> float:
    return objective_seconds(problem, stage_costs(problem, _stage_of(cuts, problem)))


def _pairs(cuts: tuple[int, ...], problem: CutProblem) -> zip[tuple[int, int]]:
    return zip((0, *cuts), (*cuts, len(problem.cost.groups)))


def _stage_of(cuts: tuple[int, ...], problem: CutProblem) -> tuple[int, ...]:
    return tuple(s for s, (i, j) in enumerate(_pairs(cuts, problem)) for _ in range(i, j))


def _partition(costs: Sequence[Matrix], combine: Callable[[Matrix, Matrix], Matrix]) -> tuple[int, ...] | None:
    """Where to cut so that the combined cost of the intervals is least, or None if it is infinite."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = 0.0
    choices = []
    for cost in costs:
        reached = combine(best[:, None], cost)
        choices.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    cuts = [size - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:-1]))
