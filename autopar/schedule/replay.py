"""The time of a step under any schedule, for many durations: the order of its actions is found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.schedule.actions import Action
from autopar.schedule.fast_1f1b import pipeline_seconds
from autopar.schedule.generate import generate
from autopar.schedule.order import Links, chain_edges, run_order


@dataclass(frozen=True)
class Step:
    """An action: its rank, its number, the number of what says how long it takes, its microbatch, and for each action
    that it takes a tensor of, that one's number and the two chunks."""

    rank: int
    number: int
    duration: int
    microbatch: int
    sources: tuple[tuple[int, tuple[int, int]], ...]


def scheduled_seconds(
    schedule: str,
    pp: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    sizes: Sequence[float],
) -> float:
    """The same as `replayed_seconds` in the quickest way; with one chunk a rank all schedules but GPipe are 1F1B."""
    if len(forward_seconds) > pp:
        return replayed_seconds(schedule, pp, forward_seconds, backward_seconds, transfers, sizes)
    name = "gpipe" if schedule == "gpipe" else "1f1b"
    return pipeline_seconds(name, forward_seconds, backward_seconds, transfers, sizes)


def replayed_seconds(
    schedule: str,
    pp: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    sizes: Sequence[float],
) -> float:
    """The ``step_seconds`` of `simulate` for ``generate(schedule, pp, …)``; the other arguments as there."""
    num_chunks = len(forward_seconds)
    skips = tuple(sorted((src, dst) for src, dst in transfers if src + 1 < dst))
    steps = steps_of(schedule, pp, len(sizes), num_chunks // pp, skips)
    durations = [*forward_seconds, *backward_seconds]
    ends = [0.0] * len(steps)
    free = [0.0] * pp
    for step in steps:
        start, size = free[step.rank], sizes[step.microbatch]
        for source, pair in step.sources:
            arrival = ends[source] + transfers.get(pair, 0.0) * size
            if arrival > start:
                start = arrival
        free[step.rank] = ends[step.number] = start + durations[step.duration] * size
    return max(free)


@lru_cache(maxsize=32)
def steps_of(
    schedule: str, pp: int, microbatches: int, chunks: int, skips: tuple[tuple[int, int], ...]
) -> tuple[Step, ...]:
    """The actions of a schedule in an order in which they can run; ``skips`` are edges beside those of the chain."""
    num_chunks = pp * chunks
    links = Links.of([*chain_edges(num_chunks), *skips], num_chunks)
    order = run_order(generate(schedule, pp, microbatches, chunks), links)
    number = {action: i for i, (_, action) in enumerate(order)}

    def step(rank: int, action: Action) -> Step:
        sources = tuple((number[a], (a.chunk, action.chunk)) for a in links.before(action))
        duration = action.chunk + num_chunks * (action.kind == "B")
        return Step(rank, number[action], duration, action.microbatch, sources)

    return tuple(step(rank, action) for rank, action in order)
