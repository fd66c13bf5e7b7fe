"""List scheduling: an order of forwards and split backwards for given times and memory.

A rank that is free runs gradients of inputs that have arrived, else a forward, else gradients of weights, which nobody
waits for. `ListOrder.alternates` prefers a forward after gradients of inputs; which way is shorter depends on times. A
rank keeps the activations of so many microbatches at most, from their forward to the gradients of their weights.

With twice as many as 1F1B keeps, the step is as short as any can be where ranks are equal: each waits for the first
forwards of those before it and is busy from then on. With half as many, ZB-H1 may be shorter.

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 3; there with one chunk a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from autopar.errors import ScheduleError
from autopar.ir.plan_parts import ListOrder
from autopar.schedule.actions import Action, ActionKind, Schedule


class Choice(NamedTuple):
    """The next action of a rank, and when it can start.

    ``kind`` is None while the rank waits for a tensor; ``start`` is infinite if none is on its way.
    """

    start: float
    kind: ActionKind | None
    chunk: int = 0


class Progress:
    """Actions that have run so far, and when the tensors of the others arrive."""

    def __init__(self, order: ListOrder, pp: int, microbatches: int) -> None:
        self.order, self.pp, self.microbatches = order, pp, microbatches
        self.num_chunks = num_chunks = len(order.forward)
        self.deepest_first = [range(rank, num_chunks, pp)[::-1] for rank in range(pp)]  # chunks of each rank
        self.ran: list[tuple[int, Action]] = []  # rank and action
        self.last_kind: list[ActionKind] = ["F"] * pp
        self.free = [0.0] * pp
        self.kept = [0] * pp
        self.forwards, self.backwards = [0] * num_chunks, [0] * num_chunks  # number of those that have run
        self.activations = [[inf] * microbatches for _ in range(num_chunks)]  # when they arrive
        self.gradients = [[inf] * microbatches for _ in range(num_chunks)]
        self.activations[0] = [0.0] * microbatches
        self.deferred: list[deque[tuple[int, int]]] = [deque() for _ in range(pp)]  # chunk and microbatch

    def next_choice(self, rank: int) -> Choice:
        """The rank's next action, from what is known so far."""
        order, free = self.order, self.free[rank]
        forward, forward_chunk = self.next_forward(rank, free)
        backward, backward_chunk = self.next_backward(rank, free)
        if forward <= free and (backward > free or (order.alternates and self.last_kind[rank] == "I")):
            return Choice(forward, "F", forward_chunk)
        if backward <= free:
            return Choice(backward, "I", backward_chunk)
        soonest = min(backward, forward)
        if self.deferred[rank]:
            chunk, _ = self.deferred[rank][0]
            if soonest - free >= (0 if order.alternates else order.wgrad[chunk] / 2):
                return Choice(free, "W", chunk)
        return Choice(soonest, None)

    def next_forward(self, rank: int, free: float) -> tuple[float, int]:
        """Start and chunk of the forward that can start first once the rank is free.

        Of those that can at once it is one of the first group of as many microbatches as ranks, as in interleaved 1F1B.
        Room stays for a forward of each deeper chunk of the rank, without which no activation would be freed.
        """
        start, at, group = inf, 0, 0
        for chunk in self.deepest_first[rank][: self.order.max_in_flight[rank] - self.kept[rank]]:
            number = self.forwards[chunk]
            if number < self.microbatches:
                arrival = self.activations[chunk][number]
                if arrival < free:
                    arrival = free
                if arrival < start or (arrival == start and (number // self.pp, chunk) < (group, at)):
                    start, at, group = arrival, chunk, number // self.pp
        return start, at

    def next_backward(self, rank: int, free: float) -> tuple[float, int]:
        """Start and chunk of the gradients of inputs that can start first once the rank is free; of the deepest chunk
        that can at once."""
        start, at = inf, 0
        for chunk in self.deepest_first[rank]:
            number = self.backwards[chunk]
            if number < self.microbatches:
                arrival = self.gradients[chunk][number]
                if arrival < free:
                    arrival = free
                if arrival < start:
                    start, at = arrival, chunk
        return start, at

    def run(self, rank: int, kind: ActionKind, chunk: int) -> None:
        """Run a chunk's next action of a kind as soon as its rank is free."""
        order = self.order
        if kind == "F":
            i, seconds = self.forwards[chunk], order.forward[chunk]
        elif kind == "I":
            i, seconds = self.backwards[chunk], order.input_grad[chunk]
        else:
            (_, i), seconds = self.deferred[rank].popleft(), order.wgrad[chunk]
        end = self.free[rank] = self.free[rank] + seconds
        self.ran.append((rank, action(kind, chunk, i)))
        self.last_kind[rank] = kind
        if kind == "F":
            self.kept[rank] += 1
            self.forwards[chunk] += 1
            if chunk == self.num_chunks - 1:
                self.gradients[chunk][i] = end
            else:
                self.activations[chunk + 1][i] = end + order.hop
        elif kind == "I":
            self.backwards[chunk] += 1
            self.deferred[rank].append((chunk, i))
            if chunk:
                self.gradients[chunk - 1][i] = end + order.hop
        else:
            self.kept[rank] -= 1


action = lru_cache(maxsize=16384)(Action)  # to make one takes as long as to choose it


@lru_cache(maxsize=256)
def list_schedule(order: ListOrder, pp: int, microbatches: int) -> Schedule:
    """The schedule of every rank. Raises as `listed_actions`."""
    rows: list[list[Action]] = [[] for _ in range(pp)]
    for rank, listed in listed_actions(order, pp, microbatches):
        rows[rank].append(listed)
    return tuple(map(tuple, rows))


def listed_actions(order: ListOrder, pp: int, microbatches: int) -> Sequence[tuple[int, Action]]:
    """(rank, action) of the schedule, in an order in which they can run.

    Raises:
        ScheduleError: the ranks keep too few microbatches for their chunks.
    """
    progress = Progress(order, pp, microbatches)
    choices = [progress.next_choice(rank) for rank in range(pp)]
    starts = [choice.start for choice in choices]
    while (start := min(starts)) < inf:
        rank = starts.index(start)
        _, kind, chunk = choices[rank]
        changed = [rank]
        if kind is None:
            progress.free[rank] = start
        else:
            progress.run(rank, kind, chunk)
            if kind != "W":
                changed.append((rank + (1 if kind == "F" else -1)) % pp)  # gets a tensor
        for other in changed:
            choices[other] = choice = progress.next_choice(other)
            starts[other] = choice.start
    if len(progress.ran) < 3 * progress.num_chunks * microbatches:
        raise ScheduleError(
            f"No order of {progress.num_chunks} chunks on {pp} ranks keeps at most {order.max_in_flight} activations. "
            "Allow more."
        )
    return progress.ran
