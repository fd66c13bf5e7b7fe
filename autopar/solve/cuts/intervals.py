"""Exact cost of every interval of groups as a pipeline stage, in matrices: element [j, i] is of the groups i … j − 1.

`autopar.solve.cuts.evaluate.stage_costs` defines the costs, for any assignment of groups to stages. Here they are made
for all intervals at once, because a search asks for thousands of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import le
from typing import Any

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
class Sums:
    """Sums over intervals of what every group adds by itself: element [j, i] as in a matrix."""

    until: Vector

    @classmethod
    def of(cls, amounts: Sequence[float]) -> Sums:
        """Sums of so much of each group.

        Amounts are rounded to 2⁻⁵⁰ of their sum, so that all sums are exact and equal intervals equal.
        """
        quantum = np.ldexp(1.0, np.frexp(sum(amounts))[1] - 50)
        return cls(quantum * np.cumsum(np.round(np.array([0.0, *amounts]) / quantum)))

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        end, begin = at
        return self.until[end] - self.until[begin]

    def within(self, window: tuple[slice, slice]) -> Matrix:
        """Sums of the intervals that end and begin within a window; elements with j < i are meaningless."""
        ends, begins = window
        return self.until[ends, None] - self.until[None, begins]

    @property
    def matrix(self) -> Matrix:
        """Sums of all intervals."""
        return self.within((slice(None), slice(None)))


@dataclass(frozen=True)
class Intervals:
    """Costs of all intervals of one cost graph, made as they are asked for. Fields as in `StageCost`; bytes and seconds
    of one microbatch, but for the weights'.

    Graphs with the same groups and edges, or with the same weights, share what depends on those alone.
    """

    problem: CutProblem

    def group_sums(self, *amounts: str) -> Sums:
        """Sums of what every group adds."""
        return Sums.of([sum(getattr(group, name) for name in amounts) for group in self.problem.cost.groups])

    def weight_sums(self, amount: str) -> Matrix:
        """Sums over weights, of which several groups of an interval may read one."""
        cost = self.problem.cost

        def made() -> Matrix:
            return interval_sums(len(cost.groups), ((getattr(w, amount), w.groups) for w in cost.weights))

        return cost.remember_for(("weights",), amount, made)

    @cached_property
    def forward_seconds(self) -> Sums:
        return self.group_sums("forward_seconds")

    @cached_property
    def backward_seconds(self) -> Sums:
        return Sums.of([self.problem.backward_seconds(group) for group in self.problem.cost.groups])

    @cached_property
    def wgrad_seconds(self) -> Sums:
        return self.group_sums("wgrad_seconds")

    @cached_property
    def recompute_seconds(self) -> Sums:
        return self.group_sums("recompute_seconds")

    @cached_property
    def collective_seconds(self) -> Sums:
        return self.group_sums("collective_seconds")

    @cached_property
    def weight_bytes(self) -> Matrix:
        """Bytes of weights that are allocated before the step's last backward."""
        held = self.weight_sums("num_bytes")
        return held - self.weight_sums("gradient_bytes") if self.problem.gradients_come else held

    @cached_property
    def all_saved_bytes(self) -> Matrix:
        """Bytes that an interval saves for the backward of a microbatch, received tensors included."""
        cost = self.problem.cost

        def made() -> Matrix:
            shared = interval_sums(len(cost.groups), ((a.num_bytes, a.groups) for a in cost.saved))
            return self.group_sums("saved_bytes").matrix + shared

        return cost.remember_for(("groups", "saved"), "saved", made)

    @cached_property
    def saved_bytes(self) -> Matrix:
        """Bytes that a microbatch keeps. Where backwards are split, those after the first half count if they are more.

        Error: they count from the forward on.
        """
        cost = self.problem.cost

        def received_too() -> Matrix:
            saving = [edge for edge in cost.edges if edge.saved_by]
            again = ((edge.num_bytes, [g for g in edge.saved_by if g > edge.producer]) for edge in saving)
            return interval_sums(len(cost.groups), again, [edge.producer for edge in saving])

        saved = self.all_saved_bytes - cost.remember_for(("edges",), "received too", received_too)
        return np.maximum(saved, self.group_sums("deferred_bytes").matrix) if self.problem.is_split else saved

    @cached_property
    def working(self) -> WorkingSets:
        cost = self.problem.cost
        return WorkingSets(
            self.problem,
            self.all_saved_bytes,
            cost.remember_for(("groups", "saved"), "floor", lambda: working_floor(cost, self.all_saved_bytes)),
            np.array([group.transient_bytes for group in cost.groups], float),
            self.weight_sums("flattened_grad_bytes"),
            cost.remember_for(("weights",), ("pending", *self.problem.interval_key), dict),
        )

    @property
    def symmetric_bytes(self) -> Matrix:
        sizes = [group.symmetric_buffer_bytes for group in self.problem.cost.groups]
        return self.problem.cost.remember_for(("groups",), "symmetric", lambda: running_max(sizes))

    @cached_property
    def messages(self) -> Messages:
        """Tensors that cross cuts; recomputation does not change them."""
        cost = self.problem.cost.once
        return cost.remember_for(("edges",), "messages", lambda: Messages.of(cost))

    @cached_property
    def sent_bytes(self) -> Vector:
        """Bytes that a stage sends and keeps for each microbatch, by the cut where it ends."""
        size = len(self.problem.cost.groups)
        sent = np.zeros(size + 1)
        for edge in self.problem.cost.edges:
            sent[edge.producer + 1 : min(max(edge.consumers), *edge.saved_by[:1], size) + 1] += edge.num_bytes
        return sent


def exposed_seconds(
    intervals: Intervals, backward_seconds: Vector, forward_seconds: Vector, total: Callable[[Matrix], Vector]
) -> Vector:
    """As `autopar.solve.cuts.evaluate.RankCost.exposed_seconds`, without contention, for many intervals.

    Args:
        backward_seconds, forward_seconds: passes under which reductions and gathers hide.
        total: sums of a matrix of all intervals over those of each rank.
    """
    buckets = np.maximum(1.0, total(intervals.weight_sums("num_buckets")))
    reduction, gather = (total(intervals.weight_sums(name)) for name in ("reduce_seconds", "gather_seconds"))
    exposed = np.maximum(reduction - backward_seconds, reduction / buckets)
    return exposed + np.maximum(gather - forward_seconds, gather / buckets)


@dataclass(frozen=True)
class Messages:
    """Tensors that cross cuts between groups.

    Args:
        forward_bytes, backward_bytes: bytes that cross a cut, by its position.
        incoming_bytes: messages to an interval where peers write them; the gradient of a tensor counts once, however
            many stages send it.
        crossing: edges that cross each cut.
    """

    forward_bytes: Vector
    backward_bytes: Vector
    incoming_bytes: Matrix
    crossing: tuple[tuple[TensorEdge, ...], ...]

    @classmethod
    def of(cls, cost: CostGraph) -> Messages:
        """The messages of a cost graph."""
        size = len(cost.groups)
        forward, backward = np.zeros(size + 1), np.zeros(size + 1)
        crossing: list[list[TensorEdge]] = [[] for _ in range(size + 1)]
        for edge in cost.edges:
            cuts = range(edge.producer + 1, max(edge.consumers) + 1)
            forward[cuts.start : cuts.stop] += edge.num_bytes
            backward[cuts.start : cuts.stop] += edge.num_bytes * edge.requires_grad
            for cut in cuts:
                crossing[cut].append(edge)
        return cls(forward, backward, incoming_matrix(cost), tuple(map(tuple, crossing)))


def intervals_of(problem: CutProblem) -> Intervals:
    """Costs of all intervals; made once for a cost graph and what of the problem they depend on."""
    return problem.cost.remember(("intervals", *problem.interval_key), lambda: Intervals(problem))


def is_ascending(stage_of: Sequence[int]) -> bool:
    """Whether no group is on an earlier stage than the group before it."""
    return all(map(le, stage_of, stage_of[1:]))


def leaving_edges(problem: CutProblem, stage_of: Sequence[int]) -> Iterator[TensorEdge]:
    """Edges that leave the stage of their producer."""
    if not is_ascending(stage_of):
        yield from (e for e in problem.cost.edges if {stage_of[c] for c in e.consumers} != {stage_of[e.producer]})
        return
    crossing, begin = intervals_of(problem).messages.crossing, 0
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
