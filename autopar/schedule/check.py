"""Proofs about a schedule: complete, ordered, free of deadlock, within its memory bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NoReturn

from autopar.errors import ScheduleError, UsageError
from autopar.ir.placement import Placement
from autopar.schedule.actions import Action, ActionKind, Schedule, format_grid, is_split
from autopar.schedule.order import AFTER_OWN, Links, chain_edges, run_order, topological_order, wait_cycle

GridCell = tuple[int, int]
Transfer = tuple[Action, Action]


def check(
    schedule: Schedule,
    placement: Placement,
    *,
    microbatches: int,
    edges: Collection[tuple[int, int]] | None = None,
    in_flight: Sequence[int] | None = None,
    training: bool = True,
) -> None:
    """Prove that the schedule keeps every promise on which a runtime relies.

    1. Each forward of every chunk and microbatch runs exactly once, on the chunk's rank (`Placement`); when training
       each backward too, after its own forward, or each half of it if the schedule splits any, first the gradients of
       inputs. So each receive has its send.
    2. Between any two chunks, in each direction, messages are received in the order in which they are sent. Where ranks
       have one chunk each, that holds between ranks.
    3. No deadlock when sends never wait and an action waits for all it receives.
    4. No deadlock in `check_rendezvous` either, if backwards are whole, ranks have one chunk each, and every edge joins
       consecutive chunks.
       With an edge that skips chunks only promise 3 is made, because 1F1B cannot keep the fourth where an edge spans
       three or more ranks. With edge (0, 3) and 4 microbatches, rank 3 offers rank 0 a gradient that rank 0 receives
       only after forwards whose activations rank 3 has yet to receive. Several chunks per rank break it too: the last
       rank offers the first one an activation that the first one receives only after a whole group of microbatches. A
       transport without buffers must then call `check_rendezvous` itself.
    5. No rank keeps activations of more (chunk, microbatch) pairs than ``in_flight`` allows.

    Args:
        edges: pairs (src, dst) with src < dst along which activations travel, gradients travelling back; by default
            all pairs of consecutive chunks.
        in_flight: a bound per rank; see `max_in_flight`.
        training: whether each forward has a backward; otherwise there must be none, and nothing is in flight.
    Raises:
        ScheduleError: a promise is broken; prints all ranks' actions with the bad ones marked.
        UsageError: an edge, a number or the length of ``in_flight`` does not fit the pipeline.
    """
    num_chunks = placement.num_stages
    assert len(schedule) == placement.pp, f"{len(schedule)} ranks in {placement}"
    if num_chunks < 1 or microbatches < 1:
        raise UsageError(
            f"Nothing to check: {len(schedule)} ranks, {num_chunks} chunks, {microbatches} microbatches. "
            "All must be at least 1."
        )
    links = Links.of(edges, num_chunks)
    where = _check_each_once(schedule, placement, microbatches, training)
    _check_backward_follows(schedule, where)
    _check_channels(schedule, links, where)
    run_order(schedule, links)
    is_chain = edges is None or set(edges) <= set(chain_edges(num_chunks))
    if placement.chunks == 1 and is_chain and not is_split(schedule):
        check_rendezvous(schedule, num_chunks=num_chunks, edges=edges)
    if in_flight is not None:
        _check_in_flight(schedule, in_flight)


def check_rendezvous(schedule: Schedule, *, num_chunks: int, edges: Collection[tuple[int, int]] | None = None) -> None:
    """Prove that the schedule also runs when a send waits for its receiver.

    Between two consecutive actions a rank posts all sends of the earlier and all receives of the later together, and
    continues when all of them are complete. A transfer completes once both of its ends are posted. The schedule must
    hold promises 1 to 3 of `check`.

    Raises:
        ScheduleError: the ranks wait for each other; names the cycle.
        UsageError: an edge does not fit the pipeline.
    Source: Megatron-LM's batched isend and irecv (send_forward_recv_backward and its relatives).
    """
    links = Links.of(edges, num_chunks)
    where = {action: (rank, index) for rank, row in enumerate(schedule) for index, action in enumerate(row)}
    peers: dict[GridCell, list[tuple[GridCell, Transfer]]] = defaultdict(list)
    for action, (rank, index) in where.items():
        for taker in links.after(action):
            assert taker in where, f"{taker} is missing: check the schedule first"
            other, other_index = where[taker]
            if other != rank:
                sent, taken = (rank, index + 1), (other, other_index)
                peers[sent].append((taken, (action, taker)))
                peers[taken].append((sent, (action, taker)))
    # Node (rank, gap) is "the rank has posted the transfers before its action number gap"; it needs those of the gap
    # before it to be complete, that is posted on their other side too.
    rows = [[(rank, gap) for gap in range(len(row) + 2)] for rank, row in enumerate(schedule)]
    reached = topological_order(rows, lambda node: [place for place, _ in peers[node[0], node[1] - 1]])
    if not reached.stuck:
        return
    words, marked = [], []
    for rank in wait_cycle(reached.stuck, lambda node: node[0]):
        (_, next_gap), (other, other_gap) = reached.stuck[rank]
        gap = next_gap - 1
        source, taker = next(transfer for place, transfer in peers[rank, gap] if place == (other, other_gap))
        row = schedule[rank]
        before = f"before {row[gap]}" if gap < len(row) else f"after {row[-1]}"
        after = f"after {schedule[other][other_gap - 1]}"
        words.append(
            f"rank {rank} waits {before} in the transfer {source} → {taker}, which rank {other} posts only {after}"
        )
        marked.append((rank, gap))
    _fail(
        f"The schedule comes to a halt when sends wait for their receivers: {'; '.join(words)}. "
        "Use a transport that buffers sends, or another order.",
        schedule,
        marked,
    )


def in_flight_counts(row: Sequence[Action]) -> tuple[int, ...]:
    """After each action of a rank, the number of forwards whose backward is still to end."""
    ends = {(a.chunk, a.microbatch) for a in row if a.ends_backward}
    change = ((a.kind == "F") - a.ends_backward if (a.chunk, a.microbatch) in ends else 0 for a in row)
    return tuple(accumulate(change))


def _fail(words: str, schedule: Schedule, marked: Collection[GridCell]) -> NoReturn:
    raise ScheduleError(f"{words}\n{format_grid(schedule, marked)}")


def _check_each_once(
    schedule: Schedule, placement: Placement, microbatches: int, training: bool
) -> Mapping[Action, GridCell]:
    num_chunks = placement.num_stages
    where: dict[Action, GridCell] = {}
    for rank, row in enumerate(schedule):
        for index, action in enumerate(row):
            if action.chunk >= num_chunks or action.microbatch >= microbatches:
                words = f"of {num_chunks} chunks and {microbatches} microbatches (both count from 0). Remove it."
                _fail(f"{action} on rank {rank} is not one {words}", schedule, [(rank, index)])
            if action.kind != "F" and not training:
                words = "is a backward, and nothing is trained here. Remove it."
                _fail(f"{action} on rank {rank} {words}", schedule, [(rank, index)])
            if (own := placement.position(action.chunk)) != rank:
                words = f"chunk {action.chunk} belongs to rank {own} of {placement.pp}. Move it there."
                _fail(f"{action} is on rank {rank}, but {words}", schedule, [(rank, index)])
            if action in where:
                words = f"as actions {where[action][1]} and {index} (counted from 0). Remove one."
                _fail(f"{action} runs twice on rank {rank}, {words}", schedule, [where[action], (rank, index)])
            where[action] = (rank, index)
    backward: tuple[ActionKind, ...] = ("I", "W") if is_split(schedule) else ("B",)
    kinds = ("F", *(backward if training else ()))
    for action, (rank, index) in where.items():
        if action.kind not in kinds:
            words = "is a whole backward, and others are split. Split it into I and W, or none."
            _fail(f"{action} on rank {rank} {words}", schedule, [(rank, index)])
    for chunk in range(num_chunks):
        for microbatch in range(microbatches):
            for action in (Action(kind, chunk, microbatch) for kind in kinds):
                if action not in where:
                    rank = placement.position(chunk)
                    words = f"rank {rank} ends after {len(schedule[rank])} actions without it. Add it."
                    _fail(f"{action} is missing: {words}", schedule, [(rank, len(schedule[rank]))])
    return where


def _check_backward_follows(schedule: Schedule, where: Mapping[Action, GridCell]) -> None:
    for action, place in where.items():
        earlier = AFTER_OWN.get(action.kind)
        if earlier is None:
            continue
        first = Action(earlier, action.chunk, action.microbatch)
        if place < where[first]:
            name = "forward" if earlier == "F" else "gradients of inputs"
            words = f"as action {place[1]} of rank {place[0]}; {first} is action {where[first][1]}. Swap them."
            _fail(f"{action} runs before its own {name}, {words}", schedule, [place])


def _check_channels(schedule: Schedule, links: Links, where: Mapping[Action, GridCell]) -> None:
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    taken: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for action in where:
        for taker in links.after(action):
            sent[action.chunk, taker.chunk].append((action, taker))
        for source in links.before(action):
            taken[source.chunk, action.chunk].append((source, action))
    for (chunk, other), transfers in sent.items():
        for number, (ours, theirs) in enumerate(zip(transfers, taken[chunk, other], strict=True)):
            if ours != theirs:
                _fail(
                    f"Message {number} (counted from 0) from chunk {chunk} to chunk {other} is sent as {ours[0]} → "
                    f"{ours[1]} but taken as {theirs[0]} → {theirs[1]}. Run both chunks' actions in the same order.",
                    schedule,
                    [where[ours[0]], where[theirs[1]]],
                )


def _check_in_flight(schedule: Schedule, in_flight: Sequence[int]) -> None:
    if len(in_flight) != len(schedule):
        raise UsageError(f"in_flight has {len(in_flight)} bounds for {len(schedule)} ranks. Give one per rank.")
    for rank, (row, bound) in enumerate(zip(schedule, in_flight)):
        for index, kept in enumerate(in_flight_counts(row)):
            if kept > bound:
                several = any(action.chunk != rank for action in row)
                what = "(chunk, microbatch) pairs" if several else "microbatches"
                words = f"keeps the activations of {kept} {what} after {row[index]}, its bound is {bound}"
                _fail(f"Rank {rank} {words}. Run a backward before it.", schedule, [(rank, index)])
