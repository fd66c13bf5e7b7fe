"""Columns: every interval of the groups as every stage, each with or without recomputation, and paths of them.

A path is a column per stage, each beginning where the one before ends: contiguous cuts. Under any weights of the
columns' quantities the cheapest path is a shortest path of a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.ir.hardware import Link
from autopar.solve.cuts.dynamic_programme import StageIntervals, stage_intervals
from autopar.solve.cuts.evaluate import load_matrix, one_way_seconds
from autopar.solve.cuts.intervals import Intervals, Matrix, Vector
from autopar.solve.cuts.problem import CutProblem


class Quantity(IntEnum):
    """What a column contributes. ``SENT`` and ``RETURNED`` are seconds of the messages to and from the next stage, and
    leave out tensors of which it is not known that the next stage reads them; ``TAIL`` are the seconds after the
    pipeline on a rank with one stage. ``STANDING``, ``HELD`` and ``WORKING`` are bytes."""

    FORWARD = 0
    BACKWARD = auto()
    SENT = auto()
    RETURNED = auto()
    TAIL = auto()
    UPDATE = auto()
    REDUCE = auto()
    GATHER = auto()
    LOAD = auto()
    TRAFFIC = auto()
    STANDING = auto()
    HELD = auto()
    WORKING = auto()


# Weights of quantities, [stages, quantities], and what a path has of each.
Weights = NDArray[np.float64]
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Path:
    """Contiguous cuts: stage s is groups ``ends[s − 1]`` … ``ends[s]`` − 1 in way ``ways[s]``. ``amounts`` are its
    columns' quantities."""

    ends: Cuts
    ways: tuple[int, ...]
    amounts: Weights

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of every group."""
        return tuple(s for s, (i, j) in enumerate(pairwise((0, *self.ends))) for _ in range(i, j))


@dataclass(frozen=True)
class Columns:
    """Columns of a problem that fit by themselves.

    ``quantities[way][stage]`` has a matrix per quantity, element [j, i] of groups i … j − 1; ``base[way][stage]`` is 0
    or, where a column is forbidden, infinite. With one stage a rank there is a single way: a column recomputes as
    little as its memory asks for. Otherwise ranks' memory decides, and every way is a column of its own.
    """

    problem: CutProblem
    quantities: Sequence[Sequence[Sequence[Matrix]]]
    base: Sequence[list[Matrix]]

    def cost(self, way: int, stage: int, weights: Vector) -> Matrix:
        """Weighted quantities of a stage's columns."""
        total = self.base[way][stage]
        for quantity, weight in enumerate(weights):
            if weight:
                total = total + weight * self.quantities[way][stage][quantity]
        return total

    def cheapest_way(self, stage: int, weights: Vector) -> tuple[Matrix, NDArray[np.int64] | None]:
        """Least cost of a stage's columns over their ways, and the way where there are several."""
        costs = [self.cost(way, stage, weights) for way in range(len(self.base))]
        if len(costs) == 1:
            return costs[0], None
        return np.minimum.reduce(costs), np.argmin(costs, axis=0)

    def path(self, ends: Cuts, ways: tuple[int, ...]) -> Path:
        """The path with the given ends of its stages."""
        amounts = np.array(
            [
                [matrix[j, i] for matrix in self.quantities[way][stage]]
                for stage, (way, (i, j)) in enumerate(zip(ways, pairwise((0, *ends)), strict=True))
            ]
        )
        return Path(ends, ways, amounts)

    def shortest(self, weights: Weights) -> tuple[float, Path | None]:
        """Cost of the cheapest path, and that path; infinite where there is none."""
        reached, choices, ways = np.array([0.0]), [], []
        size = len(self.problem.cost.groups) + 1
        for stage in range(self.problem.stages):
            matrix, way = self.cheapest_way(stage, weights[stage])
            reached = np.pad(reached, (0, size - len(reached)), constant_values=np.inf)
            sums = reached[None, :] + matrix
            choice = sums.argmin(axis=1)
            reached = sums[np.arange(size), choice]
            choices.append(choice)
            ways.append(way)
        value = float(reached[-1])
        if not np.isfinite(value):
            return value, None
        ends = [size - 1]
        for choice in reversed(choices):
            ends.append(int(choice[ends[-1]]))
        ends.reverse()
        picked = (0 if way is None else int(way[j, i]) for way, (i, j) in zip(ways, pairwise(ends)))
        return value, self.path(tuple(ends[1:]), tuple(picked))

    def cheap(self, weights: Weights, limit: float) -> Iterator[tuple[int, int, int, int]]:
        """Columns (stage, i, j, way) of which some path costs at most the limit."""
        size, stages = len(self.problem.cost.groups) + 1, self.problem.stages
        costs = [[self.cost(way, stage, weights[stage]) for way in range(len(self.base))] for stage in range(stages)]
        before, after = [np.full(size, np.inf)], [np.full(size, np.inf)]
        before[0][0] = after[0][-1] = 0.0
        for own in costs:
            before.append((before[-1][None, :] + np.minimum.reduce(own)).min(axis=1))
        for own in reversed(costs):
            after.append((after[-1][:, None] + np.minimum.reduce(own)).min(axis=0))
        for stage, own in enumerate(costs):
            for way, cost in enumerate(own):
                through = before[stage][None, :] + cost + after[stages - 1 - stage][:, None]
                for j, i in np.argwhere(through <= limit).tolist():
                    yield stage, i, j, way

    def keep(self, among: Iterable[tuple[int, int, int, int]]) -> None:
        """Leave out all columns but some from now on."""
        kept = [[np.full_like(matrix, np.inf) for matrix in way] for way in self.base]
        for stage, i, j, way in among:
            kept[way][stage][j, i] = 0.0
        for way, matrices in enumerate(kept):
            self.base[way][:] = matrices


def columns_of(problem: CutProblem) -> Columns:
    """All columns that fit by themselves.

    Error: the symmetric memory that a rank has because another rank receives more is left out, and so is, with several
        stages a rank, what two of its stages share.
    """
    ways = [problem, problem.recomputing] if problem.may_recompute else [problem]
    intervals = [stage_intervals(way) for way in ways]
    quantities = [[quantities_of(own, stage) for stage in range(problem.stages)] for own in intervals]
    fits = [
        [
            np.isfinite(own.times(stage).stage_seconds) & fits_alone(own, stage, quantities[way][stage])
            for stage in range(problem.stages)
        ]
        for way, own in enumerate(intervals)
    ]
    if len(ways) > 1 and problem.chunks == 1:
        chosen = [
            [np.where(fits[0][s], once, again) for once, again in zip(quantities[0][s], quantities[1][s], strict=True)]
            for s in range(problem.stages)
        ]
        quantities, fits = [chosen], [[once | again for once, again in zip(*fits, strict=True)]]
    return Columns(problem, quantities, [[np.where(own, 0.0, np.inf) for own in way] for way in fits])


def fits_alone(own: StageIntervals, stage: int, quantities: Sequence[Matrix]) -> NDArray[np.bool_]:
    """Columns that the rank could hold besides empty other stages."""
    problem = own.problem
    if problem.capacity_bytes is None:
        return np.ones_like(quantities[Quantity.HELD], dtype=bool)
    held = problem.in_flight[stage]
    if problem.chunks > 1:
        held = max(profile[stage // problem.pp] for profile in problem.in_flight_profiles[stage % problem.pp])
    need = quantities[Quantity.STANDING] + held * quantities[Quantity.HELD] + quantities[Quantity.WORKING]
    return need <= problem.capacity_bytes


def quantities_of(own: StageIntervals, stage: int) -> list[Matrix]:
    """The quantities of all columns of a stage; matrices that stages share are made once."""
    problem, of = own.problem, own.costs
    last = stage == problem.stages - 1
    cache, size = problem.cost.derived, len(problem.cost.groups) + 1
    link = None if last else problem.boundary[stage]
    flags = (problem.has_buckets, problem.gradients_come, problem.microbatches > 1)
    key = ("quantities", link, flags)
    if key not in cache:
        cache[key] = (
            *next_stage_seconds(problem, link), tail_seconds(of), of.optimizer_seconds + of.contention_seconds,
            of.reduce_seconds - of.backward_seconds, of.gather_seconds - of.forward_seconds,
        )  # fmt: skip
    sent, returned, tail, update, reduce, gather = cache[key]
    traffic = np.zeros((size, size))
    if link is not None:
        pairs = zip(of.forward_bytes, of.backward_bytes)
        traffic += np.array([sum(one_way_seconds(int(n), link) for n in pair) for pair in pairs])[:, None]
    working = of.working.matrix if problem.capacity_bytes is not None else of.working.floor
    standing = own.standing_bytes + problem.fixed_bytes(stage)
    return [of.forward_seconds, of.backward_seconds, sent, returned, tail, update, reduce, gather,
            load_matrix(problem), traffic, standing, own.held_bytes, working]  # fmt: skip


def tail_seconds(of: Intervals) -> Matrix:
    """What a rank with one stage takes after the pipeline, of every interval: `RankCost.exposed_seconds` and the
    optimizer."""
    buckets = np.maximum(1.0, of.num_buckets)
    return (
        np.maximum(of.reduce_seconds - of.backward_seconds, of.reduce_seconds / buckets)
        + np.maximum(of.gather_seconds - of.forward_seconds, of.gather_seconds / buckets)
        + of.contention_seconds
        + of.optimizer_seconds
    )


def next_stage_seconds(problem: CutProblem, link: Link | None) -> tuple[Matrix, Matrix]:
    """Seconds of the message from every interval to the next stage, and back: at least of what the interval produces
    and the first group behind it reads."""
    size = len(problem.cost.groups) + 1
    sent, returned = np.zeros((size, size)), np.zeros((size, size))
    if link is None:
        return sent, returned
    for edge in problem.cost.edges:
        for consumer in edge.consumers:
            sent[consumer, : edge.producer + 1] += edge.num_bytes
            returned[consumer, : edge.producer + 1] += edge.num_bytes * edge.requires_grad
    for matrix in (sent, returned):
        matrix[matrix > 0] = matrix[matrix > 0] / link.bytes_per_second + link.latency_seconds
    return sent, returned
