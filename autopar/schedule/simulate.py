"""The time of a step under a schedule, from the durations of its actions and transfers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import SPLIT, ListOrder
from autopar.schedule.actions import Action, ActionKind, Schedule, is_split
from autopar.schedule.check import in_flight_counts
from autopar.schedule.fast_step_time import pipeline_seconds
from autopar.schedule.generate import generate
from autopar.schedule.list_schedule import listed_actions
from autopar.schedule.order import Links, chain_edges, run_order
from autopar.schedule.timeline import Span, Timeline


def simulate(
    schedule: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float] | None = None,
    sizes: Sequence[float] | None = None,
    wgrad_seconds: Sequence[float] | None = None,
) -> Timeline:
    """The step in which every action starts as soon as its rank is free and its tensors have arrived.

    A transfer delays its receiver and occupies neither rank; any number travel concurrently.

    Args:
        forward_seconds, backward_seconds: per chunk, second.
        transfers: from (chunk, chunk) to second: (src, dst) with src < dst for an activation, (dst, src) for its
            gradient; 0 where absent. Consecutive chunks always depend on each other, others where (src, dst) is here.
        sizes: per microbatch, a factor on the time of its actions and transfers (a ragged last one is < 1).
        wgrad_seconds: per chunk, the part of ``backward_seconds`` that computes gradients of weights, second; read
            where the schedule splits backwards.
    Raises:
        ScheduleError: the schedule comes to a halt (`check` proves much more and should run first).
        UsageError: durations, transfers or sizes do not fit the schedule or are negative.
    Error: exact for these durations; real ranks add launch gaps and share links.
    """
    transfers = dict(transfers or {})
    num_microbatches = 1 + max((action.microbatch for row in schedule for action in row), default=-1)
    factors = [1.0] * num_microbatches if sizes is None else sizes
    num_chunks = len(forward_seconds)
    edges = {*chain_edges(num_chunks), *(pair for pair in transfers if pair[0] < pair[1])}
    _validate(schedule, forward_seconds, backward_seconds, transfers, factors, num_microbatches, edges)
    durations = action_seconds(forward_seconds, backward_seconds, wgrad_seconds if is_split(schedule) else None)
    actions = in_run_order(schedule, edges, num_chunks)
    spans: list[Span] = []
    run_actions(actions, len(schedule), durations, sources(edges, transfers, num_chunks), factors, spans)
    spans.sort(key=lambda span: span.rank)
    busy = [0.0] * len(schedule)
    for timed in actions:
        busy[timed.rank] += durations[timed.duration] * factors[timed.microbatch]
    return Timeline(tuple(spans), tuple(busy), tuple(max(in_flight_counts(row), default=0) for row in schedule))


def action_seconds(
    forward_seconds: Sequence[float], backward_seconds: Sequence[float], wgrad_seconds: Sequence[float] | None
) -> list[float]:
    """Seconds by `TimedAction.duration`: of whole backwards without ``wgrad_seconds``, which then take no time."""
    wgrad = [0.0] * len(backward_seconds) if wgrad_seconds is None else wgrad_seconds
    return [*forward_seconds, *(b - w for b, w in zip(backward_seconds, wgrad, strict=True)), *wgrad]


@dataclass(frozen=True)
class Pipelined:
    """A generated schedule: arguments of `autopar.schedule.generate.generate` except for the microbatches."""

    schedule: str
    placement: Placement
    order: ListOrder | None = None

    @property
    def is_split(self) -> bool:
        return self.schedule in SPLIT


def scheduled_seconds(
    pipeline: Pipelined,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    sizes: Sequence[float],
    wgrad_seconds: Sequence[float],
) -> float:
    """As `replayed_seconds`, in the fastest way; with one chunk per rank all schedules except GPipe are 1F1B."""
    schedule = pipeline.schedule
    if pipeline.placement.chunks > 1 or pipeline.is_split:
        return replayed_seconds(pipeline, forward_seconds, backward_seconds, transfers, sizes, wgrad_seconds)
    name = "gpipe" if schedule == "gpipe" else "1f1b"
    return pipeline_seconds(name, forward_seconds, backward_seconds, transfers, sizes)


def replayed_seconds(
    pipeline: Pipelined,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    sizes: Sequence[float],
    wgrad_seconds: Sequence[float],
) -> float:
    """The ``step_seconds`` of `simulate` for a generated schedule, whose order of actions is cached."""
    actions, received = generated_actions(pipeline, transfers, len(sizes))
    durations = action_seconds(forward_seconds, backward_seconds, wgrad_seconds if pipeline.is_split else None)
    return run_actions(actions, pipeline.placement.pp, durations, received, sizes)


def generated_actions(
    pipeline: Pipelined, transfers: Mapping[tuple[int, int], float], microbatches: int
) -> tuple[Sequence[TimedAction], Sources]:
    """The actions of a generated schedule in run order, and the transfers that each receives.

    Skips change no order: what a skip brings is made before what the chunks between bring.
    """
    num_chunks = pipeline.placement.num_stages
    edges = {*chain_edges(num_chunks), *(pair for pair in transfers if pair[0] < pair[1])}
    return generated_in_run_order(pipeline, microbatches), sources(edges, transfers, num_chunks)


@dataclass(frozen=True)
class CriticalPath:
    """Actions and transfers of which each begins where the one before ends, from the step's begin to its end.

    With other durations it is a path of dependencies still, so that no step of this schedule is shorter than its sum.

    Args:
        forward, backward: per chunk, how often its action is on the path, a ragged microbatch by its size.
        transfers: number for each (src, dst), counted alike.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    transfers: Mapping[tuple[int, int], float]


def critical_path(
    pipeline: Pipelined,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    sizes: Sequence[float],
) -> CriticalPath:
    """The path of dependencies whose sum is `scheduled_seconds`; of a schedule with whole backwards."""
    assert not pipeline.is_split, f"{pipeline} has other paths"
    num_chunks, pp = len(forward_seconds), pipeline.placement.pp
    if pipeline.placement.chunks == 1 and pipeline.schedule != "gpipe":
        pipeline = replace(pipeline, schedule="1f1b")
    actions, received = generated_actions(pipeline, transfers, len(sizes))
    durations = [*forward_seconds, *backward_seconds]
    ends: dict[tuple[int, int], float] = {}
    waited: dict[tuple[int, int], tuple[int, int] | None] = {}  # the action that each begins after
    latest: list[tuple[int, int] | None] = [None] * pp
    for rank, _, microbatch, duration in actions:
        size, cause = sizes[microbatch], latest[rank]
        start = ends[cause] if cause is not None else 0.0
        for source, seconds in received[duration]:
            arrival = ends[source, microbatch] + seconds * size
            if arrival > start:
                start, cause = arrival, (source, microbatch)
        ends[duration, microbatch] = start + durations[duration] * size
        waited[duration, microbatch] = cause
        latest[rank] = duration, microbatch
    rank_of = {(duration, microbatch): rank for rank, _, microbatch, duration in actions}
    counts, sent = [0.0] * len(durations), dict[tuple[int, int], float]()
    at: tuple[int, int] | None = max(ends, key=lambda key: ends[key])
    while at is not None:
        counts[at[0]] += sizes[at[1]]
        cause = waited[at]
        if cause is not None and rank_of[cause] != rank_of[at]:
            pair = cause[0] % num_chunks, at[0] % num_chunks
            sent[pair] = sent.get(pair, 0.0) + sizes[at[1]]
        at = cause
    return CriticalPath(counts[:num_chunks], counts[num_chunks:], sent)


FIRST_DURATION: Mapping[ActionKind, int] = {"F": 0, "B": 1, "I": 1, "W": 2}  # in numbers of chunks


class TimedAction(NamedTuple):
    """An action of a rank; ``duration`` is the index of its time in `action_seconds`: of all chunks' forwards, then
    their backwards or gradients of inputs, then their gradients of weights."""

    rank: int
    action: Action
    microbatch: int
    duration: int


# For each duration, those of the actions whose tensors its action receives, and the seconds of the transfer.
Sources = Sequence[Sequence[tuple[int, float]]]


def sources(edges: Collection[tuple[int, int]], transfers: Mapping[tuple[int, int], float], num_chunks: int) -> Sources:
    """The transfers that each action waits for."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(3 * num_chunks)]
    for src, dst in edges:
        found[dst].append((src, transfers.get((src, dst), 0.0)))
        found[num_chunks + src].append((num_chunks + dst, transfers.get((dst, src), 0.0)))
    return found


def run_actions(
    actions: Sequence[TimedAction],
    num_ranks: int,
    durations: Sequence[float],
    received: Sources,
    sizes: Sequence[float],
    spans: list[Span] | None = None,
) -> float:
    """Seconds until the last action ends, if each starts as soon as its rank is free and its tensors have arrived.

    Args:
        spans: takes each action's start and end, if given.
    """
    ends = [[0.0] * len(sizes) for _ in durations]
    free = [0.0] * num_ranks
    for rank, action, microbatch, duration in actions:
        size, start = sizes[microbatch], free[rank]
        for source, seconds in received[duration]:
            arrival = ends[source][microbatch] + seconds * size
            if arrival > start:
                start = arrival
        end = free[rank] = ends[duration][microbatch] = start + durations[duration] * size
        if spans is not None:
            spans.append(Span(rank, action, start, end))
    return max(free, default=0.0)


@lru_cache(maxsize=256)
def generated_in_run_order(pipeline: Pipelined, microbatches: int) -> tuple[TimedAction, ...]:
    """As `in_run_order`, for a generated schedule whose edges join consecutive chunks."""
    pp, num_chunks = pipeline.placement.pp, pipeline.placement.num_stages
    if pipeline.order is not None:
        return timed_actions(listed_actions(pipeline.order, pp, microbatches), num_chunks)
    rows = generate(pipeline.schedule, pipeline.placement, microbatches, pipeline.order)
    done = [[False] * microbatches for _ in range(2 * num_chunks)]
    found: list[TimedAction] = []
    waiting: dict[tuple[int, int], int] = {}  # rank that waits for a duration of a microbatch
    place, ready = [0] * pp, list(reversed(range(pp)))
    while ready:
        rank = ready.pop()
        row, at = rows[rank], place[rank]
        while at < len(row):
            action = row[at]
            microbatch, kind = action.microbatch, action.kind
            if kind == "W":
                found.append(TimedAction(rank, action, microbatch, 2 * num_chunks + action.chunk))
                at += 1
                continue
            other = action.chunk - 1 if kind == "F" else action.chunk + 1
            first = 0 if kind == "F" else num_chunks
            if 0 <= other < num_chunks and not done[first + other][microbatch]:
                waiting[first + other, microbatch] = rank
                break
            done[first + action.chunk][microbatch] = True
            found.append(TimedAction(rank, action, microbatch, first + action.chunk))
            at += 1
            if (waiter := waiting.pop((first + action.chunk, microbatch), None)) is not None:
                ready.append(waiter)
        place[rank] = at
    assert not waiting, f"{pipeline} with {microbatches} microbatches comes to a halt"
    return tuple(found)


def in_run_order(schedule: Schedule, edges: Collection[tuple[int, int]], num_chunks: int) -> tuple[TimedAction, ...]:
    """The actions of a schedule in an order in which they can run.

    Raises:
        ScheduleError: the ranks wait for each other, or for an action that no rank has.
    """
    return timed_actions(run_order(schedule, Links.of(edges, num_chunks)), num_chunks)


def timed_actions(actions: Iterable[tuple[int, Action]], num_chunks: int) -> tuple[TimedAction, ...]:
    """(rank, action) with the index of each one's time."""
    return tuple(
        TimedAction(rank, action, action.microbatch, action.chunk + num_chunks * FIRST_DURATION[action.kind])
        for rank, action in actions
    )


def one_f_one_b_seconds(stage_seconds: Sequence[float], microbatches: int) -> float:
    """Time of a 1F1B step in closed form, (microbatches - 1) · max + sum of the stages' forward + backward seconds.

    Transfers are free in it. Let f and b be the stages' forward and backward times and t = f + b.
    - Simulated <= formula where one stage has both the longest forward and the longest backward; so always when
      forward and backward are proportional on all stages. Otherwise simulated <= sum t + (microbatches - 1) ·
      (max f + max b), which may exceed the formula: f = (1, 0, 0, 0), b = (0, 1, 0, 0), 4 microbatches take 7, not 5.
    - Simulated >= formula where the last stage is a slowest one. For every stage s, simulated >= microbatches · t[s] +
      the t before s. Where an early stage is the slowest, later ones may be hidden by it, and the formula is high.
    - Hence equal when forward and backward are proportional and the last stage is a slowest one, as in balanced stages.

    Error: 0 in those cases; elsewhere high by at most the sum of t after the slowest stage, and low by at most
        (microbatches - 1) · (max f + max b - max t).
    Source: on a path of dependencies, forwards number (stage + microbatch) upwards one by one, so there are at most
        microbatches - 1 of them beyond one per stage; likewise backwards. The lower bounds are such paths.
    """
    assert stage_seconds and microbatches >= 1, f"{len(stage_seconds)} stages, {microbatches} microbatches"
    return (microbatches - 1) * max(stage_seconds) + sum(stage_seconds)


def _validate(
    schedule: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    transfers: Mapping[tuple[int, int], float],
    factors: Sequence[float],
    num_microbatches: int,
    edges: Collection[tuple[int, int]],
) -> None:
    num_chunks = 1 + max((action.chunk for row in schedule for action in row), default=-1)
    lengths = (
        ("forward_seconds", len(forward_seconds), num_chunks, "chunks"),
        ("backward_seconds", len(backward_seconds), num_chunks, "chunks"),
        ("sizes", len(factors), num_microbatches, "microbatches"),
    )
    for name, length, expected, noun in lengths:
        if length != expected:
            raise UsageError(f"{name} has {length} numbers, the schedule has {expected} {noun}. Give one for each.")
    numbers = [
        *((f"forward_seconds[{i}]", x) for i, x in enumerate(forward_seconds)),
        *((f"backward_seconds[{i}]", x) for i, x in enumerate(backward_seconds)),
        *((f"transfers[{pair}]", x) for pair, x in transfers.items()),
        *((f"sizes[{i}]", x) for i, x in enumerate(factors)),
    ]
    for name, x in numbers:
        if not (math.isfinite(x) and x >= 0):
            raise UsageError(f"{name} is {x}. Durations and sizes must be finite and at least 0.")
    for src, dst in transfers:
        if src >= dst and (dst, src) not in edges:
            raise UsageError(
                f"transfers[({src}, {dst})] is no hop of this pipeline: a gradient travels back along an edge. "
                f"Give transfers[({dst}, {src})] too, or remove it."
            )
