"""Exact cost of every interval of groups as a pipeline stage, in matrices: element [j, i] is of the groups i … j − 1.

`autopar.solve.cuts.evaluate.stage_costs` defines the costs, for any assignment of groups to stages. Here they are made
for all intervals at once, because a search asks for thousands of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import le

import numpy as np
from numpy.typing import NDArray

from autopar.ir.comm_sizes import message_bytes
from autopar.ir.cost_graph import CostGraph, ResidentTensor, TensorEdge
from autopar.solve.cuts.memory import pending_gradients
from autopar.solve.cuts.problem import CutProblem

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


def interval_sums(
    size: int, amounts: Iterable[tuple[float, Sequence[int]]], before: Sequence[int] | None = None
) -> Matrix:
    """Element [j, i]: the amounts of all holdings (amount, groups) with a group in i … j − 1, each once.

    Args:
        before: for each amount, a group that must lie before i; it lies before the amount's own groups.
    """
    corners, empty = np.zeros((size + 2, size + 2)), True
    for number, (amount, groups) in enumerate(amounts):
        if not amount:
            continue
        empty = False
        previous = -1 if before is None else before[number]
        for group in sorted(groups):
            # Counted by the first of its groups in the interval: previous < i <= group < j.
            corners[previous + 1, group + 1] += amount
            corners[group + 1, group + 1] -= amount
            previous = group
    if empty:
        return corners[: size + 1, : size + 1]
    return np.ascontiguousarray(corners.cumsum(axis=0).cumsum(axis=1)[: size + 1, : size + 1].T)


@dataclass(frozen=True)
class Intervals:
    """Costs of all intervals of one cost graph. Fields as in `StageCost`; bytes and seconds of one microbatch, but for
    the weights'.

    Args:
        received_bytes, sent_bytes: of a stage that begins or ends at a cut, by the cut's position.
        forward_bytes, backward_bytes: bytes that cross a cut, by its position.
        incoming_bytes: messages to an interval where peers write them; the gradient of a tensor counts once, however
            many stages send it.
        crossing: edges that cross each cut.
    """

    forward_seconds: Matrix
    backward_seconds: Matrix
    collective_seconds: Matrix
    optimizer_seconds: Matrix
    reduce_seconds: Matrix
    gather_seconds: Matrix
    contention_seconds: Matrix
    num_buckets: Matrix
    weight_bytes: Matrix
    saved_bytes: Matrix
    working: WorkingSets
    symmetric_bytes: Matrix
    received_bytes: Vector
    sent_bytes: Vector
    forward_bytes: Vector
    backward_bytes: Vector
    incoming_bytes: Matrix
    crossing: tuple[tuple[TensorEdge, ...], ...]


def intervals_of(problem: CutProblem) -> Intervals:
    """Costs of all intervals; made once for a cost graph and what of the problem they depend on."""
    return problem.cost.remember(("intervals", *problem.interval_key), lambda: make_intervals(problem))


def make_intervals(problem: CutProblem) -> Intervals:
    """As `intervals_of`, without a cache."""
    cost, size = problem.cost, len(problem.cost.groups)

    def groups(amount: str) -> Matrix:
        return interval_sums(size, ((getattr(group, amount), (g,)) for g, group in enumerate(cost.groups)))

    def weights(amount: str) -> Matrix:
        return interval_sums(size, ((getattr(weight, amount), weight.groups) for weight in cost.weights))

    saved = groups("saved_bytes") + interval_sums(size, ((a.num_bytes, a.groups) for a in cost.saved))
    saving = [edge for edge in cost.edges if edge.saved_by]
    again = ((edge.num_bytes, [g for g in edge.saved_by if g > edge.producer]) for edge in saving)
    received_too = interval_sums(size, again, [edge.producer for edge in saving])
    forward, backward, sent = np.zeros(size + 1), np.zeros(size + 1), np.zeros(size + 1)
    crossing: list[list[TensorEdge]] = [[] for _ in range(size + 1)]
    for edge in cost.edges:
        last = max(edge.consumers)
        forward[edge.producer + 1 : last + 1] += edge.num_bytes
        backward[edge.producer + 1 : last + 1] += edge.num_bytes * edge.requires_grad
        sent[edge.producer + 1 : min(last, *edge.saved_by[:1], size) + 1] += edge.num_bytes
        for cut in range(edge.producer + 1, last + 1):
            crossing[cut].append(edge)
    return Intervals(
        forward_seconds=groups("forward_seconds"),
        backward_seconds=groups("backward_seconds"),
        collective_seconds=groups("forward_collective_seconds") + groups("backward_collective_seconds"),
        optimizer_seconds=weights("optimizer_seconds"),
        reduce_seconds=weights("reduce_seconds"),
        gather_seconds=weights("gather_seconds"),
        contention_seconds=weights("contention_seconds"),
        num_buckets=weights("num_buckets"),
        weight_bytes=interval_sums(size, ((problem.standing_bytes(w), w.groups) for w in cost.weights)),
        saved_bytes=saved - received_too,
        working=WorkingSets(
            problem,
            saved,
            working_floor(cost, saved),
            np.array([group.transient_bytes for group in cost.groups], float),
            interval_sums(size, ((w.flattened_grad_bytes, w.groups) for w in cost.weights)),
            {},
        ),
        symmetric_bytes=running_max([group.symmetric_buffer_bytes for group in cost.groups]),
        received_bytes=problem.kept_received * forward,
        sent_bytes=sent,
        forward_bytes=forward,
        backward_bytes=backward,
        incoming_bytes=incoming_matrix(cost),
        crossing=tuple(map(tuple, crossing)),
    )


def is_ascending(stage_of: Sequence[int]) -> bool:
    """Whether no group is on an earlier stage than the group before it."""
    return all(map(le, stage_of, stage_of[1:]))


def leaving_edges(problem: CutProblem, stage_of: Sequence[int]) -> Iterator[TensorEdge]:
    """Edges that leave the stage of their producer."""
    if not is_ascending(stage_of):
        yield from (e for e in problem.cost.edges if {stage_of[c] for c in e.consumers} != {stage_of[e.producer]})
        return
    crossing, begin = intervals_of(problem).crossing, 0
    for s in range(problem.stages - 1):
        end = bisect_right(stage_of, s)
        yield from (edge for edge in crossing[end] if edge.producer >= begin)
        begin = end


def incoming_matrix(cost: CostGraph) -> Matrix:
    """Element [j, i]: bytes of the messages that groups i … j − 1 receive: tensors that are made before i, and
    gradients of those that are read from j on."""
    size = len(cost.groups)
    edges = [(message_bytes(edge.num_bytes), edge) for edge in cost.edges]
    found = interval_sums(size, ((n, edge.consumers) for n, edge in edges), [edge.producer for _, edge in edges])
    for n, edge in edges:
        if edge.requires_grad:
            found[edge.producer + 1 : max(edge.consumers) + 1, : edge.producer + 1] += n
    return found


def running_max(values: Sequence[int]) -> Matrix:
    """Element [j, i]: the largest of the values i … j − 1, or 0."""
    size = len(values)
    found = np.zeros((size + 1, size + 1))
    for j, value in enumerate(values):
        found[j + 1, : j + 1] = np.maximum(found[j, : j + 1], value)
    return found


def working_floor(cost: CostGraph, saved: Matrix) -> Matrix:
    """Working set of every interval without pending gradients.

    Args:
        saved: bytes that each interval saves for the backward of a microbatch.
    """
    size = len(cost.groups)
    working, found = np.zeros(size + 1), running_max([group.workspace_bytes for group in cost.groups])
    for j, group in enumerate(cost.groups):
        more = saved[j + 1, : j + 1] - saved[j, : j + 1]
        working[: j + 1] = np.maximum(working[: j + 1] - more, group.transient_bytes)
        found[j + 1, : j + 1] = np.maximum(found[j + 1, : j + 1], working[: j + 1])
    return found


@dataclass(frozen=True)
class WorkingSets:
    """Working set of single intervals, as `autopar.solve.cuts.memory.working_bytes` defines it.

    A backward of the interval up to j runs the groups k = j − 1 … i. Group k needs its own transient bytes and the
    gradients that are pending. The activations saved by later groups are freed: saved[j, i] − saved[k + 1, i].

    Args:
        saved: bytes that each interval saves for the backward of a microbatch. floor: of `working_floor`.
    """

    problem: CutProblem
    saved: Matrix
    floor: Matrix
    transient: Vector
    flattened: Matrix
    pending: dict[int, tuple[Vector, Vector, Vector]]

    def num_bytes(self, begin: int, end: int) -> int:
        """Working set of the groups ``begin`` … ``end`` − 1."""
        before, arrived, after = self.pending_before(begin, end)
        saved, inside = self.saved[:, begin], slice(begin, end)
        left = after[0]
        packed = self.flattened[end, begin] + (0.0 if self.problem.has_buckets else left)
        running = (self.transient[inside] + before + saved[begin + 1 : end + 1]).max()
        most = max(running, (arrived + saved[inside]).max(), left, packed) - saved[end]
        return int(max(self.floor[end, begin], most))

    @cached_property
    def matrix(self) -> Matrix:
        """Working set of every interval."""
        found, size = np.array(self.floor), len(self.transient)
        outside = np.triu(np.ones((size, size), dtype=bool), 1)  # groups before the interval's first
        for end in range(1, size + 1):
            before, arrived, after = self.pending_before(0, end)
            running = (self.transient[:end] + before)[:, None] + self.saved[1 : end + 1, :end]
            most = np.maximum(running, arrived[:, None] + self.saved[:end, :end])
            most[outside[:end, :end]] = -np.inf
            packed = self.flattened[end, :end] + (0.0 if self.problem.has_buckets else after)
            most = np.maximum.reduce([most.max(axis=0), after, packed]) - self.saved[end, :end]
            found[end, :end] = np.maximum(found[end, :end], most)
        return found

    def pending_before(self, begin: int, end: int) -> tuple[Vector, Vector, Vector]:
        """Pending gradients of a backward of the groups ``end`` − 1 … ``begin``, by group; see `PendingGradients`.

        A backward to an earlier group begins with them, so the longest one that was asked for is kept.
        """
        if end not in self.pending or len(self.pending[end][0]) < end - begin:
            first = max(0, 2 * begin - end)
            arriving = [[w for w, later in self.completed_by[g] if later >= end] for g in reversed(range(first, end))]
            found = pending_gradients(self.problem, arriving)
            before, arrived, after = (np.array(x[::-1], float) for x in (found.before, found.arrived, found.after))
            self.pending[end] = before, np.where(arrived > 0, arrived, -np.inf), after
        before, arrived, after = self.pending[end]
        return before[begin - end :], arrived[begin - end :], after[begin - end :]

    @cached_property
    def completed_by(self) -> list[list[tuple[ResidentTensor, int]]]:
        """Weights with gradients of each group, and the next later group that reads each, or the number of groups."""
        size = len(self.problem.cost.groups)
        found: list[list[tuple[ResidentTensor, int]]] = [[] for _ in range(size)]
        for weight in self.problem.cost.weights:
            if weight.gradient_bytes:
                for group, later in pairwise((*sorted(weight.groups), size)):
                    found[group].append((weight, later))
        return found
