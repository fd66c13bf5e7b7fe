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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from autopar.errors import ScheduleError
from autopar.ir.plan_parts import ListOrder
from autopar.schedule.actions import Action, ActionKind, Schedule


@dataclass(frozen=True)
class Choice:
    """The next action of a rank, and when it can start.

    ``action`` is None while the rank waits for a tensor; ``start`` is infinite if none is on its way.
    """

    start: float
    action: Action | None


class Progress:
    """Actions that have run so far, and when the tensors of the others arrive."""

    def __init__(self, order: ListOrder, pp: int, microbatches: int) -> None:
        self.order, self.pp, self.microbatches = order, pp, microbatches
        self.num_chunks = num_chunks = len(order.forward)
        self.rows: list[list[Action]] = [[] for _ in range(pp)]
        self.free = [0.0] * pp
        self.kept = [0] * pp
        self.forwards, self.backwards = [0] * num_chunks, [0] * num_chunks  # number of those that have run
        self.activations = [[inf] * microbatches for _ in range(num_chunks)]  # when they arrive
        self.gradients = [[inf] * microbatches for _ in range(num_chunks)]
        self.activations[0] = [0.0] * microbatches
        self.deferred: list[deque[Action]] = [deque() for _ in range(pp)]

    def next_choice(self, rank: int) -> Choice:
        """The rank's next action, from what is known so far."""
        order, free, chunks = self.order, self.free[rank], range(rank, self.num_chunks, self.pp)
        # Of ready forwards one of the first group of as many microbatches as ranks, as in interleaved 1F1B. Room stays
        # for a forward of each deeper chunk of the rank, without which no activation would be freed.
        room = order.max_in_flight[rank] - self.kept[rank]
        open_chunks = (c for c in chunks if room > len(range(c + self.pp, self.num_chunks, self.pp)))
        forward = self.first("F", free, open_chunks, lambda c: (self.forwards[c] // self.pp, c))
        backward = self.first("I", free, chunks, lambda c: -c)
        ready = [choice for choice in (backward, forward) if choice.start <= free]
        if ready:
            last = self.rows[rank][-1].kind if self.rows[rank] else "F"
            return ready[-1] if order.alternates and last == "I" else ready[0]
        soonest = min(backward.start, forward.start)
        deferred = self.deferred[rank][0] if self.deferred[rank] else None
        if deferred is not None and soonest - free >= (0 if order.alternates else order.wgrad[deferred.chunk] / 2):
            return Choice(free, deferred)
        return Choice(soonest, None)

    def first(self, kind: ActionKind, free: float, chunks: Iterable[int], priority: Callable[[int], Any]) -> Choice:
        """The first action of a kind that can start once the rank is free; of those that can at once, that of the chunk
        whose priority is lowest."""
        counts, times = (self.forwards, self.activations) if kind == "F" else (self.backwards, self.gradients)
        left = (c for c in chunks if counts[c] < self.microbatches)
        start, _, chunk = min(((max(times[c][counts[c]], free), priority(c), c) for c in left), default=(inf, 0, 0))
        return Choice(start, Action(kind, chunk, counts[chunk]) if start < inf else None)

    def run(self, rank: int, action: Action) -> None:
        """Run an action as soon as its rank is free."""
        order, chunk, i = self.order, action.chunk, action.microbatch
        seconds = {"F": order.forward, "I": order.input_grad, "W": order.wgrad}[action.kind][chunk]
        end = self.free[rank] = self.free[rank] + seconds
        self.rows[rank].append(action)
        if action.kind == "F":
            self.kept[rank] += 1
            self.forwards[chunk] += 1
            if chunk == self.num_chunks - 1:
                self.gradients[chunk][i] = end
            else:
                self.activations[chunk + 1][i] = end + order.hop
        elif action.kind == "I":
            self.backwards[chunk] += 1
            self.deferred[rank].append(Action("W", chunk, i))
            if chunk:
                self.gradients[chunk - 1][i] = end + order.hop
        else:
            self.kept[rank] -= 1
            self.deferred[rank].popleft()


@lru_cache(maxsize=256)
def list_schedule(order: ListOrder, pp: int, microbatches: int) -> Schedule:
    """The schedule of every rank.

    Raises:
        ScheduleError: the ranks keep too few microbatches for their chunks.
    """
    progress = Progress(order, pp, microbatches)
    choices = [progress.next_choice(rank) for rank in range(pp)]
    while True:
        rank = min(range(pp), key=lambda r: choices[r].start)
        if choices[rank].start == inf:
            break
        action = choices[rank].action
        if action is None:
            progress.free[rank] = choices[rank].start
        else:
            progress.run(rank, action)
        for other in {rank, (rank - 1) % pp, (rank + 1) % pp}:  # those that it may have sent something
            choices[other] = progress.next_choice(other)
    if sum(map(len, progress.rows)) < 3 * progress.num_chunks * microbatches:
        raise ScheduleError(
            f"No order of {progress.num_chunks} chunks on {pp} ranks keeps at most {order.max_in_flight} activations. "
            "Allow more."
        )
    return tuple(map(tuple, progress.rows))
