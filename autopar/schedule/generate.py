"""Schedules by name: one pure function per schedule, from rank, placement and microbatches to the rank's actions.

Every backward phase runs its microbatches in forward order. Gradients then accumulate in the order in which one device
would add them, and messages between two stages stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby, pairwise, zip_longest
from operator import ge

from autopar.errors import UsageError, suggest
from autopar.ir.placement import V_SHAPED, Placement
from autopar.ir.plan_parts import FIXED_CHUNKS, ListOrder, schedules_with
from autopar.schedule.actions import Action, ActionKind, Schedule
from autopar.schedule.list_schedule import list_schedule


def forward_only(rank: int, placement: Placement, microbatches: int, ahead: int = 0) -> tuple[Action, ...]:
    """Actions of a rank for inference: every forward, no backward; chunks take turns as in `interleaved`."""
    groups = microbatch_groups(placement.pp, microbatches, ahead)
    return tuple(Action("F", stage, i) for group in groups for stage in placement.stages(rank) for i in group)


def gpipe(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for GPipe: every forward, then every backward.

    Source: Huang et al. 2019, section 2.3; there the backward phase runs in reverse order.
    """
    forwards = forward_only(rank, placement, microbatches)
    return forwards + tuple(Action("B", rank, i) for i in range(microbatches))


def one_f_one_b(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for 1F1B: min(pp - rank - 1, microbatches) warm-up forwards, pairs F B, the other backwards.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.1; here for any number of microbatches.
    """
    return interleaved(rank, placement, microbatches)


def interleaved(rank: int, placement: Placement, microbatches: int, ahead: int = 0) -> tuple[Action, ...]:
    """Actions of a rank for interleaved 1F1B: `warmup` forwards, pairs F B, the other backwards.

    Microbatches pass in `microbatch_groups`. A rank runs a group's forwards on its first chunk, then on its second one,
    and so on; it runs the group's backwards from its last chunk to its first. With equal chunks on p ranks, v per rank,
    and m >= p microbatches, the bubble is (p - 1) / (v · m) of the busy time. That holds whether or not p divides m,
    and for any ``ahead``.

    Args:
        ahead: microbatches of a group beyond the number of ranks.
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.2; the order is Megatron-LM's where p divides m and
    ``ahead``
        is 0, as Megatron-LM requires. Groups of p and a shorter rest would take up to 1.4 times as long.
    """
    forwards = forward_only(rank, placement, microbatches, ahead)
    backwards = tuple(
        Action("B", stage, i)
        for group in microbatch_groups(placement.pp, microbatches, ahead)
        for stage in reversed(placement.stages(rank))
        for i in group
    )
    first = min(warmup(rank, placement, microbatches, ahead), len(forwards))
    steady = tuple(action for pair in zip(forwards[first:], backwards) for action in pair)
    return forwards[:first] + steady + backwards[len(forwards) - first :]


def zb_h1(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for ZB-H1: 1F1B whose backwards are split, the gradients of weights running ``rank`` later.

    Every rank keeps the activations of at most p microbatches, as many as the first rank of 1F1B. For forwards F,
    gradients of inputs I and of weights W, the bubble is (p - 1) · (F + I - W) instead of (p - 1) · (F + I + W).

    Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 2.1.
    """
    row: list[Action] = []
    for action in one_f_one_b(rank, placement, microbatches):
        row.append(action if action.kind == "F" else replace(action, kind="I"))
        if action.kind == "B" and action.microbatch >= rank:
            row.append(Action("W", rank, action.microbatch - rank))
    return tuple(row) + tuple(Action("W", rank, i) for i in range(max(0, microbatches - rank), microbatches))


def zb_v(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for ZB-V: split backwards, and stages in a V, p and 2·pp − 1 − p on rank p.

    Every rank keeps at most 2·pp activations of its stages, which are half as large as those of 1F1B: as much memory as
    1F1B's first rank needs. Where F, I and W take equally long, a rank waits for the first forwards of the ranks before
    it and is busy from then on. With fewer than 2·pp − 1 microbatches, actions of missing ones are left out.

    Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), the V-shaped schedule with zero bubble.
    """
    pp, (down, up) = placement.pp, placement.stages(rank)
    row, counts = list[Action](), dict[tuple[ActionKind, int], int]()

    def run(kinds: Sequence[ActionKind], stage: int) -> None:
        for kind in kinds:
            number = counts[kind, stage] = counts.get((kind, stage), -1) + 1
            if number < microbatches:
                row.append(Action(kind, stage, number))

    for _ in range(2 * (pp - rank) - 1):  # until the first microbatch is back
        run(("F",), down)
    for _ in range(rank):
        run(("F",), up)
        run(("F",), down)
    for _ in range(pp - rank):  # until its gradient is back
        run(("F", "I", "W"), up)
    for _ in range(max(microbatches - pp, pp - 1)):
        run(("F", "I", "W"), down)
        run(("F", "I", "W"), up)
    for _ in range(rank):
        run(("I",), down)
        run(("I",), up)
    for _ in range(pp - rank):
        run(("I", "W"), down)
    for stage in (up, down):
        run(("W",) * rank, stage)
    return tuple(row)


def interleaved_overlap(rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
    """Actions of a rank for `interleaved` whose groups have one microbatch more than ranks, which hides transfers.

    A microbatch needs p · (F + T) to pass p ranks, F a forward and T a transfer. A rank with p microbatches in a group
    has work for p · F in that time. It waits for p · T on every chunk, in its first forwards and in its last backwards.
    With one microbatch more it does not wait where p · T <= F. On 4 ranks with 6 chunks each, 8 microbatches, forwards
    of 0.9, backwards of 1.45 and transfers of 0.09 ms, a step takes 120.4 instead of 124.0 ms, and 119.9 with free
    transfers. The price is memory: there 47 activations instead of 27.

    Source: Narayanan et al. 2021, section 2.2.2, for the order; the size of the groups by simulation.
    """
    return interleaved(rank, placement, microbatches, OVERLAP_EXTRA)


# Microbatches of a group beyond the number of ranks in `interleaved_overlap`.
OVERLAP_EXTRA = 1


def microbatch_groups(pp: int, microbatches: int, ahead: int = 0) -> tuple[range, ...]:
    """Microbatches in groups of at least n = pp + ahead and fewer than 2·n, as equal as possible, larger ones first.

    There is one group where there are fewer than n microbatches. While a rank runs a group on one chunk, the group's
    first microbatch passes the other ranks. A group smaller than pp would wait for that microbatch; a group of pp waits
    for its transfers.
    """
    count = max(1, microbatches // (pp + ahead))
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def may_overlap(pp: int, microbatches: int) -> bool:
    """Whether `interleaved_overlap` differs from `interleaved`.

    It does not with fewer than 2·pp microbatches, nor where the groups have pp + 1 microbatches already.
    """
    return microbatch_groups(pp, microbatches, OVERLAP_EXTRA) != microbatch_groups(pp, microbatches)


def warmup(rank: int, placement: Placement, microbatches: int, ahead: int = 0) -> int:
    """Forwards of a rank before its first pair F B, if it has as many.

    With several chunks, the first backward is that of the last chunk; by then the first group has passed all other
    chunks. Two more forwards for each later rank let an activation and a gradient travel while the ranks compute. With
    one chunk, half of those take as long where transfers are free, and keep fewer activations: this is 1F1B.
    """
    later = placement.pp - rank - 1
    if placement.chunks == 1:
        return later
    return (placement.chunks - 1) * len(microbatch_groups(placement.pp, microbatches, ahead)[0]) + 2 * later


def interleaved_in_flight(rank: int, placement: Placement, microbatches: int, ahead: int = 0) -> int:
    """Maximum number of activations in flight: the `warmup` forwards and the forward of a pair, or all there are."""
    return min(placement.chunks * microbatches, warmup(rank, placement, microbatches, ahead) + 1)


def zb_v_in_flight(rank: int, placement: Placement, microbatches: int) -> int:
    """Maximum number of activations in flight: those of both stages before the first gradient of weights."""
    return min(2 * placement.pp - rank - 1, microbatches) + min(rank + 1, microbatches)


@dataclass(frozen=True)
class ScheduleSpec:
    """Functions of a schedule, each of (rank, placement, microbatches).

    Args:
        actions: the actions of a rank.
        max_in_flight: the most (chunk, microbatch) pairs whose activations a rank keeps at one time.
    """

    actions: Callable[[int, Placement, int], tuple[Action, ...]]
    max_in_flight: Callable[[int, Placement, int], int]


SCHEDULES: Mapping[str, ScheduleSpec] = {
    "forward-only": ScheduleSpec(forward_only, lambda rank, placement, microbatches: 0),
    "gpipe": ScheduleSpec(gpipe, lambda rank, placement, microbatches: microbatches),
    "1f1b": ScheduleSpec(one_f_one_b, interleaved_in_flight),
    "interleaved": ScheduleSpec(interleaved, interleaved_in_flight),
    "interleaved-overlap": ScheduleSpec(interleaved_overlap, partial(interleaved_in_flight, ahead=OVERLAP_EXTRA)),
    "zb-h1": ScheduleSpec(zb_h1, lambda rank, placement, microbatches: min(placement.pp, microbatches)),
    "zb-v": ScheduleSpec(zb_v, zb_v_in_flight),
}


def generate(name: str, placement: Placement, microbatches: int, order: ListOrder | None = None) -> Schedule:
    """The actions of every rank, for any number of ranks, microbatches and chunks per rank.

    Args:
        order: of a searched schedule.
    Raises:
        UsageError: no schedule has that name, a number is below 1, or its stages do not lie like that.
    """
    spec = _schedule_spec(name, placement, microbatches, order)
    return tuple(spec.actions(rank, placement, microbatches) for rank in range(placement.pp))


def max_in_flight(name: str, rank: int, placement: Placement, microbatches: int, order: ListOrder | None = None) -> int:
    """The most (chunk, microbatch) pairs whose activations ``rank`` keeps for a backward at one time.

    With p ranks, v chunks per rank and m microbatches: 0 without backwards, m for GPipe, min(m, p - rank) for 1F1B,
    min(m, p) for ZB-H1, min(m, 2·p - rank - 1) + min(m, rank + 1) for ZB-V. With more than one chunk it is
    min(v·m, (v - 1)·n + 2·(p - rank - 1) + 1), where n is the size of the largest of `microbatch_groups`. Interleaved
    has n of at most 2·p - 1, and p where p divides m; interleaved-overlap at most 2·p + 1, and p + 1 where p + 1
    divides m. A searched schedule has its limit.

    Raises:
        UsageError: as of `generate`, or the rank is not in the pipeline.
    """
    spec = _schedule_spec(name, placement, microbatches, order)
    if not 0 <= rank < (pp := placement.pp):
        raise UsageError(f"Rank {rank} is not in a pipeline of {pp} ranks. Give a rank from 0 to {pp - 1}.")
    return spec.max_in_flight(rank, placement, microbatches)


@lru_cache(maxsize=4096)
def in_flight_profiles(
    name: str, rank: int, placement: Placement, microbatches: int, order: ListOrder | None = None
) -> tuple[tuple[int, ...], ...]:
    """Microbatches in flight per chunk of a rank, at every moment that no other moment dominates in all chunks.

    The largest sum is first and, except in searched schedules, equals `max_in_flight`. Raises as `max_in_flight`.
    """
    row = _schedule_spec(name, placement, microbatches, order).actions(rank, placement, microbatches)
    kept, profiles = [0] * placement.chunks, {(0,) * placement.chunks}
    trained = {(a.chunk, a.microbatch) for a in row if a.ends_backward}
    for action, following in zip_longest(row, row[1:]):
        if (action.chunk, action.microbatch) in trained:
            kept[action.chunk // placement.pp] += (action.kind == "F") - action.ends_backward
            # Any other moment is dominated by the one before or after.
            if action.kind == "F" and (following is None or following.kind != "F"):
                profiles.add(tuple(kept))
    dominant: list[tuple[int, ...]] = []
    # What dominates a profile has a larger sum, so it comes before.
    for _, moments in groupby(sorted(profiles, key=lambda moment: (-sum(moment), moment)), key=sum):
        dominant += [moment for moment in moments if not any(all(map(ge, other, moment)) for other in dominant)]
    return tuple(dominant)


def _schedule_spec(name: str, placement: Placement, microbatches: int, order: ListOrder | None) -> ScheduleSpec:
    known = (*SCHEDULES, "searched")
    if name not in known:
        raise UsageError(
            f"No schedule is named {name!r}. Known schedules: {', '.join(known)}.{suggest(name.lower(), known)}"
        )
    pp, chunks = placement.pp, placement.chunks
    for label, number in (("pp", pp), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise UsageError(f"Schedule {name} with {label}={number}: {label} must be at least 1.")
    if chunks != (fixed := FIXED_CHUNKS.get(name, chunks)):
        able = ", ".join(schedules_with(chunks))
        raise UsageError(f"Schedule {name} with chunks={chunks}: each rank has {fixed}. Use {able}, or chunks={fixed}.")
    assert name == "forward-only" or placement.is_v == (name in V_SHAPED), f"{name} in {placement}"
    if name == "searched":
        assert order is not None and len(order.forward) == placement.num_stages, f"{order} for {placement}"
        return searched(order)
    return SCHEDULES[name]


def searched(order: ListOrder) -> ScheduleSpec:
    """Functions of the schedule that list scheduling finds."""
    return ScheduleSpec(
        lambda rank, placement, microbatches: list_schedule(order, placement.pp, microbatches)[rank],
        lambda rank, placement, microbatches: min(order.max_in_flight[rank], placement.chunks * microbatches),
    )
