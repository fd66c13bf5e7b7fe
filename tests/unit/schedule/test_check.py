"""The checker of schedules, against planted faults and against ranks that run with queues."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.schedules import parse_schedule, sources

from autopar.errors import ScheduleError, UsageError
from autopar.ir.placement import Placement
from autopar.schedule.actions import Action, Schedule
from autopar.schedule.check import check, check_rendezvous
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate


def chain(*pairs: tuple[int, int], pp: int) -> set[tuple[int, int]]:
    return {*((i, i + 1) for i in range(pp - 1)), *pairs}


FAULTS = {
    "missing backward": (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1",
        {},
        """\
1B1 is missing: rank 1 ends after 3 actions without it. Add it.
rank 0:  0F0  0F1  0B0  0B1
rank 1:  1F0  1B0  1F1 [end]""",
    ),
    "forward twice": (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F0 1F1 1B1",
        {},
        """\
1F0 runs twice on rank 1, as actions 0 and 2 (counted from 0). Remove one.
rank 0:  0F0  0F1  0B0  0B1
rank 1: [1F0] 1B0 [1F0] 1F1  1B1""",
    ),
    "wrong rank": (
        "rank 0: 0F0 0F1 0B0 1B1 0B1\nrank 1: 1F0 1B0 1F1",
        {},
        """\
1B1 is on rank 0, but chunk 1 belongs to rank 1 of 2. Move it there.
rank 0:  0F0  0F1  0B0 [1B1] 0B1
rank 1:  1F0  1B0  1F1""",
    ),
    "unknown microbatch": (
        "rank 0: 0F0 0F2 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1",
        {},
        """\
0F2 on rank 0 is not one of 2 chunks and 2 microbatches (both count from 0). Remove it.
rank 0:  0F0 [0F2] 0B0  0B1
rank 1:  1F0  1B0  1F1  1B1""",
    ),
    "backward in inference": (
        "rank 0: 0F0 0F1\nrank 1: 1F0 1F1 1B1",
        {"training": False},
        """\
1B1 on rank 1 is a backward, and nothing is trained here. Remove it.
rank 0:  0F0  0F1
rank 1:  1F0  1F1 [1B1]""",
    ),
    "backward before forward": (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1B1 1F1",
        {},
        """\
1B1 runs before its own forward, as action 2 of rank 1; 1F1 is action 3. Swap them.
rank 0:  0F0  0F1  0B0  0B1
rank 1:  1F0  1B0 [1B1] 1F1""",
    ),
    "messages out of order": (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F1 1F0 1B0 1B1",
        {},
        """\
Message 0 (counted from 0) from chunk 0 to chunk 1 is sent as 0F0 → 1F0 but taken as 0F1 → 1F1. \
Run both chunks' actions in the same order.
rank 0: [0F0] 0F1  0B0  0B1
rank 1: [1F1] 1F0  1B0  1B1""",
    ),
    "deadlock": (
        "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1",
        {},
        """\
The schedule comes to a halt: rank 0 waits before 0B0 for 1B0, which rank 1 runs only after 1F1; \
rank 1 waits before 1F1 for 0F1, which rank 0 runs only after 0B0. Move or add the awaited action.
rank 0:  0F0 [0B0] 0F1  0B1
rank 1:  1F0 [1F1] 1B0  1B1""",
    ),
    "deadlock within a rank": (
        "rank 0: 2F0 0F0 0B0 2B0\nrank 1: 1F0 3F0 3B0 1B0",
        {"placement": Placement(2, 2), "microbatches": 1},
        """\
The schedule comes to a halt: rank 0 waits before 2F0 for 1F0, which is held up on rank 1; \
rank 1 waits before 1F0 for 0F0, which rank 0 runs only after 2F0. Move or add the awaited action.
rank 0: [2F0] 0F0  0B0  2B0
rank 1: [1F0] 3F0  3B0  1B0""",
    ),
    "deadlock by rendezvous only": (
        "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        {"microbatches": 4},
        """\
The schedule comes to a halt when sends wait for their receivers: \
rank 0 waits before 0F3 in the transfer 0F2 → 1F2, which rank 1 posts only after 1B1; \
rank 1 waits before 1F1 in the transfer 1B0 → 0B0, which rank 0 posts only after 0F3. \
Use a transport that buffers sends, or another order.
rank 0:  0F0  0F1  0F2 [0F3] 0B0  0B1  0B2  0B3
rank 1:  1F0  1B0 [1F1] 1B1  1F2  1B2  1F3  1B3""",
    ),
    "in flight too high": (
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1",
        {"in_flight": [2, 1]},
        """\
Rank 1 keeps the activations of 2 microbatches after 1F1, its bound is 1. Run a backward before it.
rank 0:  0F0  0F1  0B0  0B1
rank 1:  1F0 [1F1] 1B0  1B1""",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault: str) -> None:
    text, arguments, message = FAULTS[fault]
    with pytest.raises(ScheduleError) as error:
        check(parse_schedule(text), **{"placement": Placement(2), "microbatches": 2, **arguments})
    assert str(error.value) == message


def test_missing_forward_of_an_idle_rank() -> None:
    with pytest.raises(ScheduleError) as error:
        check((generate("1f1b", Placement(1), 1)[0], ()), Placement(2), microbatches=1)
    assert str(error.value) == (
        "1F0 is missing: rank 1 ends after 0 actions without it. Add it.\nrank 0:  0F0  0B0\nrank 1: [end]"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edges": [(1, 0)]}, "Edge (1, 0) is impossible in a pipeline of 2 chunks. Give pairs (src, dst) with "),
        ({"edges": [(0, 2)]}, "Edge (0, 2) is impossible in a pipeline of 2 chunks. Give pairs (src, dst) with "),
        ({"in_flight": [2]}, "in_flight has 1 bounds for 2 ranks. Give one per rank."),
        ({"microbatches": 0}, "Nothing to check: 2 ranks, 2 chunks, 0 microbatches. All must be at least 1."),
    ],
)
def test_check_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check(generate("1f1b", Placement(2), 2), Placement(2), **{"microbatches": 2, **arguments})
    assert str(error.value).startswith(message)


def test_long_skip_needs_buffered_sends() -> None:
    schedule, edges = generate("1f1b", Placement(4), 4), chain((0, 3), pp=4)
    check(schedule, Placement(4), microbatches=4, edges=edges)
    with pytest.raises(ScheduleError) as error:
        check_rendezvous(schedule, num_chunks=4, edges=edges)
    assert (
        str(error.value)
        == """\
The schedule comes to a halt when sends wait for their receivers: \
rank 0 waits before 0F3 in the transfer 0F2 → 3F2, which rank 3 posts only after 3B1; \
rank 3 waits before 3F1 in the transfer 3B0 → 0B0, which rank 0 posts only after 0F3. \
Use a transport that buffers sends, or another order.
rank 0:  0F0  0F1  0F2 [0F3] 0B0  0B1  0B2  0B3
rank 1:  1F0  1F1  1F2  1B0  1F3  1B1  1B2  1B3
rank 2:  2F0  2F1  2B0  2F2  2B1  2F3  2B2  2B3
rank 3:  3F0  3B0 [3F1] 3B1  3F2  3B2  3F3  3B3"""
    )


@pytest.mark.parametrize(("name", "skip"), [("gpipe", 2), ("gpipe", 5), ("forward-only", 5), ("1f1b", 2)])
def test_skips_that_need_no_buffers(name: str, skip: int) -> None:
    for microbatches in range(1, 10):
        schedule = generate(name, Placement(6), microbatches)
        for src in range(6 - skip):
            check_rendezvous(schedule, num_chunks=6, edges=chain((src, src + skip), pp=6))


def test_several_chunks_per_rank() -> None:
    schedule = parse_schedule("""\
rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1""")
    check(schedule, Placement(2, 2), microbatches=2, in_flight=[4, 4])
    assert (
        str(simulate(schedule, [1.0] * 4, [1.0] * 4))
        == """\
step 10.000 s, bubble 20.0% of it, activations in flight 4 4
rank 0: 0F0-----0F1-----2F0-----2F1-----................2B0-----2B1-----0B0-----0B1-----|  80%
rank 1: ........1F0-----1F1-----3F0-----3F1-----3B0-----3B1-----1B0-----1B1-----........|  80%"""
    )


def runs_with_queues(schedule: Schedule) -> bool:
    """Whether every rank ends, polling in-order queues that never fill."""
    last = len(schedule) - 1
    queues: dict[tuple[int, int], list[Action]] = {}
    position = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule):
            if position[rank] == len(row):
                continue
            action = row[position[rank]]
            wanted = sources(action, last)
            if any(queues.get((a.chunk, rank), [])[:1] != [a] for a in wanted):
                continue
            if action.kind == "B" and Action("F", rank, action.microbatch) not in row[: position[rank]]:
                return False
            for a in wanted:
                queues[a.chunk, rank].pop(0)
            target = rank + (1 if action.kind == "F" else -1)
            queues.setdefault((rank, target), []).append(action)
            position[rank] += 1
            moved = True
    return all(position[rank] == len(row) for rank, row in enumerate(schedule))


def runs_with_rendezvous(schedule: Schedule) -> bool:
    """Whether every rank ends when each posts a gap's transfers together and waits for all."""
    last = len(schedule) - 1
    gap = [0] * len(schedule)
    completed: set[Action] = set()

    def posted(rank: int) -> set[Action]:
        row, g = schedule[rank], gap[rank]
        sent = (
            {row[g - 1]} if 0 < g <= len(row) and 0 <= rank + (1 if row[g - 1].kind == "F" else -1) <= last else set()
        )
        return sent | ({*sources(row[g], last)} if g < len(row) else set())

    moved = True
    while moved:
        moved = False
        for rank in range(last):
            completed |= posted(rank) & posted(rank + 1)
        for rank, row in enumerate(schedule):
            if gap[rank] <= len(row) and posted(rank) <= completed:
                gap[rank] += 1
                moved = True
    return all(gap[rank] > len(row) for rank, row in enumerate(schedule))


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A generated training schedule with a few neighbouring actions swapped, and its number of microbatches."""
    name, pp, microbatches = draw(st.sampled_from(["gpipe", "1f1b"])), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = [list(row) for row in generate(name, Placement(pp), microbatches)]
    for _ in range(draw(st.integers(0, 6))):
        row = rows[draw(st.integers(0, pp - 1))]
        i = draw(st.integers(0, len(row) - 2))
        row[i : i + 2] = row[i + 1], row[i]
    return tuple(map(tuple, rows)), microbatches


@settings(max_examples=examples(300))
@given(shuffled())
def test_check_agrees_with_running_the_ranks(case: tuple[Schedule, int]) -> None:
    schedule, microbatches = case
    runs = runs_with_queues(schedule) and runs_with_rendezvous(schedule)
    try:
        check(schedule, Placement(len(schedule)), microbatches=microbatches)
        passed = True
    except ScheduleError:
        passed = False
    assert passed == runs
