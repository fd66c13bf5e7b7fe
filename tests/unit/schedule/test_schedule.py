"""Schedules: their text, the generators, the checker against planted faults and an oracle, the simulator by hand."""

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from autopar.errors import ScheduleError, UsageError
from autopar.ir.plan_parts import INTERLEAVED, ScheduleName
from autopar.schedule.actions import Action, Schedule, format_grid, format_schedule, parse_schedule
from autopar.schedule.check import check, check_rendezvous
from autopar.schedule.generate import SCHEDULES, generate, in_flight_profiles, max_in_flight, may_overlap
from autopar.schedule.simulate import one_f_one_b_seconds, replayed_seconds, simulate

numbers = st.integers(0, 10**6)
actions = st.builds(Action, st.sampled_from(["F", "B"]), numbers, numbers)
schedules = st.lists(st.lists(actions, max_size=5).map(tuple), max_size=5).map(tuple)
costs = st.integers(0, 9)
sizes = st.tuples(st.sampled_from(list(SCHEDULES)), st.integers(1, 5), st.integers(1, 6))


def chain(*pairs: tuple[int, int], pp: int) -> set[tuple[int, int]]:
    return {*((i, i + 1) for i in range(pp - 1)), *pairs}


# Text


def test_action_text() -> None:
    assert str(Action("F", 2, 0)) == "2F0"
    assert Action.parse("10B37") == Action("B", 10, 37)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "02F0", "2F0 ", "-1F0", "2F0B1", "²F0"])
def test_action_junk(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    assert str(error.value) == (
        f"{text!r} is no action. Write chunk, F or B, microbatch: 2F0 is the forward of chunk 2, microbatch 0."
    )


@given(schedules)
def test_schedule_text_round_trip(schedule: Schedule) -> None:
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_parse_ignores_blank_lines_and_spaces() -> None:
    assert parse_schedule("\n  rank 0:   0F0 0B0\n\nrank 1:\n") == ((Action("F", 0, 0), Action("B", 0, 0)), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0B0\nrank 1: 1F0 oops", "line 2, column 13: 'oops' is no action. Write chunk"),
        ("rank 0: 0F0\nrank 2: 2F0", "line 2, column 1: 'rank 2: 2F0' does not start with 'rank 1:'."),
        ("0F0 0F1", "line 1, column 1: '0F0 0F1' does not start with 'rank 0:'."),
    ],
)
def test_parse_junk_names_the_position(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse_schedule(text)
    assert str(error.value).startswith(f"Cannot read the schedule at {message}")


def test_grid_shows_a_window_of_long_rows() -> None:
    grid = format_grid(generate("forward-only", 2, 100), [(1, 50)])
    assert [line.split() for line in grid.splitlines()] == [
        ["rank", "0:", "…", *(f"0F{i}" for i in range(38, 62)), "…"],
        ["rank", "1:", "…", *(f"[1F{i}]" if i == 50 else f"1F{i}" for i in range(38, 62)), "…"],
    ]


# Generators


PRINTED = {
    ("forward-only", 2, 2): """\
rank 0: 0F0 0F1
rank 1: 1F0 1F1""",
    ("gpipe", 2, 3): """\
rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
rank 1: 1F0 1F1 1F2 1B0 1B1 1B2""",
    ("1f1b", 1, 2): """\
rank 0: 0F0 0B0 0F1 0B1""",
    ("1f1b", 3, 1): """\
rank 0: 0F0 0B0
rank 1: 1F0 1B0
rank 2: 2F0 2B0""",
    ("1f1b", 4, 2): """\
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1F1 1B0 1B1
rank 2: 2F0 2F1 2B0 2B1
rank 3: 3F0 3B0 3F1 3B1""",
    ("1f1b", 3, 4): """\
rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
}


@pytest.mark.parametrize(("name", "pp", "microbatches"), PRINTED)
def test_generated(name: str, pp: int, microbatches: int) -> None:
    assert format_schedule(generate(name, pp, microbatches)) == PRINTED[name, pp, microbatches]


def test_every_schedule_of_a_plan_has_a_recipe() -> None:
    assert set(SCHEDULES) == set(get_args(ScheduleName))
    assert {name for name, recipe in SCHEDULES.items() if recipe.allows_chunks} == {"forward-only", *INTERLEAVED}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: generate("gpip", 2, 2),
            "No schedule is named 'gpip'. Known schedules: forward-only, gpipe, 1f1b, interleaved, "
            "interleaved-overlap. Did you mean gpipe?",
        ),
        (
            lambda: generate("?", 2, 2),
            "No schedule is named '?'. Known schedules: forward-only, gpipe, 1f1b, interleaved, interleaved-overlap.",
        ),
        (lambda: generate("1f1b", 0, 2), "Schedule 1f1b with pp=0: pp must be at least 1."),
        (
            lambda: max_in_flight("1f1b", 0, 2, 0),
            "Schedule 1f1b with microbatches=0: microbatches must be at least 1.",
        ),
        (lambda: generate("interleaved", 2, 2, 0), "Schedule interleaved with chunks=0: chunks must be at least 1."),
        (
            lambda: generate("gpipe", 2, 2, 2),
            "Schedule gpipe with chunks=2: it has one chunk a rank. Use interleaved or interleaved-overlap, "
            "or chunks=1.",
        ),
        (
            lambda: max_in_flight("1f1b", 2, 2, 1),
            "Rank 2 is not in a pipeline of 2 ranks. Give a rank from 0 to 1.",
        ),
    ],
)
def test_generate_refuses(call, message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", range(1, 9))
def test_generated_schedules_pass_and_reach_their_bound(name: str, pp: int) -> None:
    for microbatches in range(1, 13):
        schedule = generate(name, pp, microbatches)
        bounds = tuple(max_in_flight(name, rank, pp, microbatches) for rank in range(pp))
        training = name != "forward-only"
        check(schedule, num_chunks=pp, microbatches=microbatches, in_flight=bounds, training=training)
        assert simulate(schedule, [1.0] * pp, [2.0] * pp).in_flight == bounds


@pytest.mark.parametrize("name", SCHEDULES)
def test_generated_schedules_pass_with_every_skip(name: str) -> None:
    for pp, microbatches in ((3, 5), (4, 2), (5, 7)):
        edges = [(src, dst) for dst in range(pp) for src in range(dst)]
        check(
            generate(name, pp, microbatches),
            num_chunks=pp,
            microbatches=microbatches,
            edges=edges,
            training=name != "forward-only",
        )


# Several chunks a rank


INTERLEAVED_ORDERS = {
    (2, 4, 2): """\
rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    (2, 1, 2): """\
rank 0: 0F0 2F0 2B0 0B0
rank 1: 1F0 3F0 3B0 1B0""",
    (2, 3, 2): """\
rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
rank 1: 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2""",
    (1, 2, 2): """\
rank 0: 0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1""",
}


@pytest.mark.parametrize(("pp", "microbatches", "chunks"), INTERLEAVED_ORDERS)
def test_interleaved(pp: int, microbatches: int, chunks: int) -> None:
    schedule = generate("interleaved", pp, microbatches, chunks)
    assert format_schedule(schedule) == INTERLEAVED_ORDERS[pp, microbatches, chunks]


OVERLAP_ORDERS = {
    (2, 3, 2): INTERLEAVED_ORDERS[2, 3, 2],  # a group of three under both
    (2, 1, 2): INTERLEAVED_ORDERS[2, 1, 2],
    (2, 4, 2): """\
rank 0: 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2B0 2F3 2B1 2B2 2B3 0B0 0B1 0B2 0B3
rank 1: 1F0 1F1 1F2 1F3 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 1B0 1B1 1B2 1B3""",
    (2, 6, 2): """\
rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 0F5 0B0 2F3 0B1 2F4 0B2 2F5 2B3 2B4 2B5 0B3 0B4 0B5
rank 1: 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 1F5 1B2 3F3 3B3 3F4 3B4 3F5 3B5 1B3 1B4 1B5""",
}


@pytest.mark.parametrize(("pp", "microbatches", "chunks"), OVERLAP_ORDERS)
def test_interleaved_overlap(pp: int, microbatches: int, chunks: int) -> None:
    schedule = generate("interleaved-overlap", pp, microbatches, chunks)
    assert format_schedule(schedule) == OVERLAP_ORDERS[pp, microbatches, chunks]


def test_megatrons_order() -> None:
    """Forward number k of a rank is of chunk k mod (p·v) div p, the warm-up 2·(p - rank - 1) + (v - 1)·p of them."""
    pp, chunks, microbatches = 4, 3, 12
    for rank, row in enumerate(generate("interleaved", pp, microbatches, chunks)):
        forwards = [a for a in row if a.kind == "F"]
        group = pp * chunks
        assert forwards == [
            Action("F", rank + k % group // pp * pp, k // group * pp + k % pp) for k in range(chunks * microbatches)
        ]
        first_backward = next(i for i, a in enumerate(row) if a.kind == "B")
        assert first_backward == 2 * (pp - rank - 1) + (chunks - 1) * pp + 1


def test_one_chunk_is_1f1b() -> None:
    for pp, microbatches in ((1, 1), (3, 2), (4, 9)):
        for name in INTERLEAVED:
            assert generate(name, pp, microbatches) == generate("1f1b", pp, microbatches)


@pytest.mark.parametrize("name", [*INTERLEAVED, "forward-only"])
@pytest.mark.parametrize("chunks", range(1, 5))
@pytest.mark.parametrize("pp", range(1, 7))
def test_interleaved_schedules_pass_and_reach_their_bound(pp: int, chunks: int, name: str) -> None:
    training = name != "forward-only"
    for microbatches in range(1, 15):
        schedule = generate(name, pp, microbatches, chunks)
        bounds = tuple(max_in_flight(name, rank, pp, microbatches, chunks) for rank in range(pp))
        for edges in (None, [(src, dst) for dst in range(pp * chunks) for src in range(dst)]):
            check(
                schedule, num_chunks=pp * chunks, microbatches=microbatches, edges=edges, in_flight=bounds,
                training=training,
            )  # fmt: skip
        stages = [1.0] * (pp * chunks)
        timeline = simulate(schedule, stages, stages)
        assert timeline.in_flight == bounds
        for rank in range(pp):
            moments = in_flight_profiles(name, rank, pp, microbatches, chunks)
            assert max(map(sum, moments)) == sum(moments[0]) == bounds[rank]
            assert not any(all(map(operator.le, a, b)) for a in moments for b in moments if a != b)


@pytest.mark.parametrize("name", INTERLEAVED)
@pytest.mark.parametrize("chunks", range(2, 5))
@pytest.mark.parametrize("pp", range(1, 7))
def test_the_bubble_of_equal_chunks(pp: int, chunks: int, name: str) -> None:
    """(p - 1) / (v · m) of the busy time, also where p does not divide m; never longer than 1F1B of the same work."""
    for microbatches in range(1, 15):
        schedule = generate(name, pp, microbatches, chunks)
        seconds = simulate(schedule, [1.0] * (pp * chunks), [2.0] * (pp * chunks)).step_seconds
        busy = 3.0 * chunks * microbatches
        if microbatches >= pp:
            assert seconds == pytest.approx(busy * (1 + (pp - 1) / (chunks * microbatches)))
        else:  # the pipeline is never full: one microbatch passes it, the others follow
            assert seconds == pytest.approx(3.0 * (pp * chunks + microbatches - 1))
        plain = simulate(generate("1f1b", pp, microbatches), [chunks * 1.0] * pp, [chunks * 2.0] * pp)
        assert seconds <= plain.step_seconds + 1e-9


@pytest.mark.parametrize("chunks", range(2, 7))
@pytest.mark.parametrize("pp", range(2, 7))
def test_overlap_hides_transfers(pp: int, chunks: int) -> None:
    """Where a round around the ranks takes no longer than a group's forwards, the pipeline's filling and its emptying
    are all that transfers add to a step, whatever the number of chunks; under interleaved every round adds one."""
    stages, transfer = pp * chunks, 1.0 / pp
    hops = {hop: transfer for s in range(stages - 1) for hop in ((s, s + 1), (s + 1, s))}
    for microbatches in range(1, 25):

        def seconds(name: str, hops: dict[tuple[int, int], float], microbatches: int = microbatches) -> float:
            return replayed_seconds(name, pp, [1.0] * stages, [2.0] * stages, hops, [1.0] * microbatches)

        free, (plain, overlap) = seconds("interleaved", {}), (seconds(name, hops) for name in INTERLEAVED)
        if microbatches > pp:
            assert overlap == pytest.approx(free + 2 * (pp - 1) * transfer)
        if microbatches > pp and microbatches % pp == 0:
            assert plain == pytest.approx(overlap + 2 * (chunks - 1) * pp * transfer)
        if may_overlap(pp, microbatches):
            assert overlap < plain - transfer / 2
        else:
            assert overlap == plain


def test_what_overlap_saves_and_keeps() -> None:
    """The figures of its docstring."""
    hops = {hop: 0.09 for s in range(23) for hop in ((s, s + 1), (s + 1, s))}
    found = {
        name: [replayed_seconds(name, 4, [0.9] * 24, [1.45] * 24, t, [1.0] * 8) for t in (hops, {})]
        for name in INTERLEAVED
    }
    assert found["interleaved"] == pytest.approx([123.99, 119.85])
    assert found["interleaved-overlap"] == pytest.approx([120.39, 119.85])
    assert [max_in_flight(name, 0, 4, m, 6) for m in (8, 16) for name in INTERLEAVED] == [27, 47, 27, 37]


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 40))
def test_overlap_is_another_order_only_where_it_says_so(pp: int, chunks: int, microbatches: int) -> None:
    plain, overlap = (generate(name, pp, microbatches, chunks) for name in INTERLEAVED)
    assert (plain != overlap) == may_overlap(pp, microbatches)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
def test_interleaved_with_equal_stages_is_never_longer_than_1f1b(
    pp: int, chunks: int, microbatches: int, forward: int, backward: int, data: st.DataObject
) -> None:
    last = data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    factors = [1.0] * (microbatches - 1) + [last if microbatches > 1 else 1.0]
    name = data.draw(st.sampled_from(INTERLEAVED))
    seconds = {
        n: replayed_seconds(name, pp, [forward / n] * (pp * n), [backward / n] * (pp * n), {}, factors)
        for n in (1, chunks)
    }
    assert seconds[chunks] <= seconds[1] * (1 + 1e-9)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.data())
def test_a_replay_is_the_simulation(pp: int, chunks: int, microbatches: int, data: st.DataObject) -> None:
    stages = pp * chunks
    forward, backward = (data.draw(st.lists(costs, min_size=stages, max_size=stages)) for _ in range(2))
    pairs = [(s, s + 1) for s in range(stages - 1)] + data.draw(
        st.lists(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).filter(lambda p: p[0] < p[1]))
    )
    delays = st.integers(0, 100)  # long enough for a skip to be what a stage waits for
    transfers = {hop: data.draw(delays) for src, dst in pairs for hop in ((src, dst), (dst, src))}
    sizes = [1.0] * (microbatches - 1) + [0.5]
    for name in (*INTERLEAVED, "forward-only"):
        timeline = simulate(generate(name, pp, microbatches, chunks), forward, backward, transfers, sizes)
        assert replayed_seconds(name, pp, forward, backward, transfers, sizes) == timeline.step_seconds


# Planted faults: (schedule, arguments of check, the whole message)


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
        "rank 0: 2F0 0F0 0B0 2B0\nrank 1: 1F0 1B0",
        {"num_chunks": 3, "microbatches": 1},
        """\
The schedule comes to a halt: rank 0 waits before 2F0 for 1F0, which is held up on rank 1; \
rank 1 waits before 1F0 for 0F0, which rank 0 runs only after 2F0. Move or add the awaited action.
rank 0: [2F0] 0F0  0B0  2B0
rank 1: [1F0] 1B0""",
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
        check(parse_schedule(text), **{"num_chunks": 2, "microbatches": 2, **arguments})
    assert str(error.value) == message


def test_missing_forward_of_an_idle_rank() -> None:
    with pytest.raises(ScheduleError) as error:
        check((generate("1f1b", 1, 1)[0], ()), num_chunks=2, microbatches=1)
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
        check(generate("1f1b", 2, 2), **{"num_chunks": 2, "microbatches": 2, **arguments})
    assert str(error.value).startswith(message)


def test_long_skip_needs_buffered_sends() -> None:
    schedule, edges = generate("1f1b", 4, 4), chain((0, 3), pp=4)
    check(schedule, num_chunks=4, microbatches=4, edges=edges)
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
        schedule = generate(name, 6, microbatches)
        for src in range(6 - skip):
            check_rendezvous(schedule, num_chunks=6, edges=chain((src, src + skip), pp=6))


def test_several_chunks_per_rank() -> None:
    schedule = parse_schedule("""\
rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1""")
    check(schedule, num_chunks=4, microbatches=2, in_flight=[4, 4])
    assert (
        str(simulate(schedule, [1.0] * 4, [1.0] * 4))
        == """\
step 10.000 s, bubble 20.0% of it, activations in flight 4 4
rank 0: 0F0-----0F1-----2F0-----2F1-----................2B0-----2B1-----0B0-----0B1-----|  80%
rank 1: ........1F0-----1F1-----3F0-----3F1-----3B0-----3B1-----1B0-----1B1-----........|  80%"""
    )


# The checker against an oracle that runs the ranks with queues


def takes(action: Action, last: int) -> tuple[Action, ...]:
    """What an action of a chain receives."""
    source = action.chunk + (-1 if action.kind == "F" else 1)
    return (Action(action.kind, source, action.microbatch),) if 0 <= source <= last else ()


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
            wanted = takes(action, last)
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
        return sent | ({*takes(row[g], last)} if g < len(row) else set())

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
    rows = [list(row) for row in generate(name, pp, microbatches)]
    for _ in range(draw(st.integers(0, 6))):
        row = rows[draw(st.integers(0, pp - 1))]
        i = draw(st.integers(0, len(row) - 2))
        row[i : i + 2] = row[i + 1], row[i]
    return tuple(map(tuple, rows)), microbatches


@settings(max_examples=examples(300), deadline=None)
@given(shuffled())
def test_check_agrees_with_running_the_ranks(case: tuple[Schedule, int]) -> None:
    schedule, microbatches = case
    runs = runs_with_queues(schedule) and runs_with_rendezvous(schedule)
    try:
        check(schedule, num_chunks=len(schedule), microbatches=microbatches)
        passed = True
    except ScheduleError:
        passed = False
    assert passed == runs


# The simulator, by hand


def spans_text(schedule: Schedule, *args, **kwargs) -> str:
    spans = simulate(schedule, *args, **kwargs).spans
    return "\n".join(
        " ".join(
            [f"rank {rank}:", *(f"{s.action}@{s.start_seconds:g}-{s.end_seconds:g}" for s in spans if s.rank == rank)]
        )
        for rank in range(len(schedule))
    )


HOPS = {(0, 1): 0.5, (1, 0): 0.25}


@pytest.mark.parametrize(
    ("schedule", "arguments", "text"),
    [
        (
            generate("1f1b", 2, 2),
            ([1, 1], [2, 2], HOPS),
            "rank 0: 0F0@0-1 0F1@1-2 0B0@4.75-6.75 0B1@7.75-9.75\n"
            "rank 1: 1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5.5 1B1@5.5-7.5",
        ),
        (  # the second microbatch is half as large
            generate("1f1b", 2, 2),
            ([1, 1], [2, 2], HOPS, [1, 0.5]),
            "rank 0: 0F0@0-1 0F1@1-1.5 0B0@4.75-6.75 0B1@6.75-7.75\nrank 1: 1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5 1B1@5-6",
        ),
        (  # a skip edge whose activation takes 5 s and whose gradient 3 s
            generate("1f1b", 3, 1),
            ([1, 1, 1], [1, 1, 1], {(0, 2): 5.0, (2, 0): 3.0}),
            "rank 0: 0F0@0-1 0B0@11-12\nrank 1: 1F0@1-2 1B0@8-9\nrank 2: 2F0@6-7 2B0@7-8",
        ),
        (
            generate("forward-only", 3, 2),
            ([1, 3, 1], [0, 0, 0]),
            "rank 0: 0F0@0-1 0F1@1-2\nrank 1: 1F0@1-4 1F1@4-7\nrank 2: 2F0@4-5 2F1@7-8",
        ),
    ],
)
def test_simulated_spans(schedule: Schedule, arguments: tuple, text: str) -> None:
    assert spans_text(schedule, *arguments) == text


def test_timeline_numbers() -> None:
    timeline = simulate(generate("1f1b", 2, 2), [1, 1], [2, 2], HOPS)
    assert timeline.step_seconds == 9.75
    assert timeline.busy_seconds == (6, 6)
    assert timeline.bubble_fraction == 1 - 6 / 9.75
    assert timeline.in_flight == (2, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_balanced_stages(name: str) -> None:
    timeline = simulate(generate(name, 4, 8), [1.0] * 4, [2.0] * 4)
    assert timeline.bubble_fraction == pytest.approx(3 / 11)
    assert timeline.step_seconds / timeline.busy_seconds[0] - 1 == pytest.approx(0.375)


def test_timeline_text() -> None:
    assert (
        str(simulate(generate("1f1b", 3, 4), [0.001] * 3, [0.002] * 3))
        == """\
step 18.000 ms, bubble 33.3% of it, activations in flight 3 2 1
rank 0: F0--F1--F2--................B0------F3--B1------....B2------....B3------|  67%
rank 1: ....F0--F1--........B0------F2--B1------F3--B2------....B3------........|  67%
rank 2: ........F0--B0------F1--B1------F2--B2------F3--B3------................|  67%"""
    )


def test_timeline_text_of_a_long_step_keeps_to_100_columns() -> None:
    lines = str(simulate(generate("1f1b", 12, 200), [1.0] * 12, [2.0] * 12)).splitlines()
    assert {len(line) for line in lines[1:]} == {100}


def test_timeline_text_of_a_step_without_duration() -> None:
    assert str(simulate(generate("gpipe", 1, 1), [0], [0])) == (
        "step 0.000 ms, bubble 0.0% of it, activations in flight 1\nrank 0: |   0%"
    )


def test_simulating_a_broken_schedule() -> None:
    with pytest.raises(ScheduleError) as error:
        simulate(parse_schedule("rank 0: 0F0 0B0\nrank 1: 1F0"), [1, 1], [1, 1])
    assert (
        str(error.value)
        == """\
The schedule comes to a halt: rank 0 waits before 0B0 for 1B0, which no rank runs. Move or add the awaited action.
rank 0:  0F0 [0B0]
rank 1:  1F0"""
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [1, 1]), "forward_seconds has 1 numbers, the schedule has 2 chunks. Give one for each."),
        (([1, 1], [1, 1], {}, [1]), "sizes has 1 numbers, the schedule has 2 microbatches. Give one for each."),
        (
            ([1, 1], [1, -1]),
            "backward_seconds[1] is -1. Durations and sizes must be finite and at least 0.",
        ),
        (
            ([1, 1], [1, 1], {(0, 1): float("nan")}),
            "transfers[(0, 1)] is nan. Durations and sizes must be finite and at least 0.",
        ),
        (
            ([1, 1], [1, 1], {(4, 3): 1.0}),
            "transfers[(4, 3)] is no hop of this pipeline: a gradient travels back along an edge. "
            "Give transfers[(3, 4)] too, or remove it.",
        ),
    ],
)
def test_simulate_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError) as error:
        simulate(generate("1f1b", 2, 2), *arguments)
    assert str(error.value) == message


@settings(max_examples=examples(200), deadline=None)
@given(sizes, st.data())
def test_spans_keep_to_ranks_and_arrivals(size: tuple[str, int, int], data: st.DataObject) -> None:
    """No rank works on two things at once, nothing starts before what it takes has arrived."""
    name, pp, microbatches = size
    per_stage = st.lists(costs, min_size=pp, max_size=pp)
    forward, backward = data.draw(per_stage), data.draw(per_stage)
    delay = data.draw(st.integers(0, 3))
    transfers = {hop: float(delay) for i in range(pp - 1) for hop in ((i, i + 1), (i + 1, i))}
    timeline = simulate(generate(name, pp, microbatches), forward, backward, transfers)
    ends = {span.action: span.end_seconds for span in timeline.spans}
    for rank in range(pp):
        own = [span for span in timeline.spans if span.rank == rank]
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(own))
        for span in own:
            assert all(ends[a] + delay <= span.start_seconds for a in takes(span.action, pp - 1))
            seconds = (forward if span.action.kind == "F" else backward)[rank]
            assert span.end_seconds - span.start_seconds == seconds


# The closed form


def simulated(forward: Sequence[int], backward: Sequence[int], microbatches: int) -> float:
    return simulate(generate("1f1b", len(forward), microbatches), forward, backward).step_seconds


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 20])
def test_closed_form_is_exact_for_balanced_stages(pp: int, microbatches: int) -> None:
    assert simulated([3] * pp, [5] * pp, microbatches) == one_f_one_b_seconds([8] * pp, microbatches)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.tuples(costs, costs), min_size=1, max_size=6), st.integers(1, 9))
def test_closed_form_bounds(stages: list[tuple[int, int]], microbatches: int) -> None:
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    total = [f + b for f, b in stages]
    step, formula = simulated(forward, backward, microbatches), one_f_one_b_seconds(total, microbatches)
    assert step <= sum(total) + (microbatches - 1) * (max(forward) + max(backward))
    assert all(step >= microbatches * t + sum(total[:s]) for s, t in enumerate(total))
    if (max(forward), max(backward)) in stages:
        assert step <= formula
    if total[-1] == max(total):
        assert step >= formula


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(costs, min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 9))
def test_closed_form_of_proportional_stages(forward: list[int], ratio: int, microbatches: int) -> None:
    backward = [ratio * f for f in forward]
    formula = one_f_one_b_seconds([f + b for f, b in zip(forward, backward)], microbatches)
    assert simulated(forward, backward, microbatches) <= formula
    longest_last = sorted(range(len(forward)), key=forward.__getitem__)
    in_order = [forward[i] for i in longest_last]
    assert simulated(in_order, [ratio * f for f in in_order], microbatches) == formula


@pytest.mark.parametrize(
    ("forward", "backward", "microbatches", "step", "formula"),
    [
        ((1, 0, 0, 0), (0, 1, 0, 0), 4, 7, 5),  # longest forward and backward on different stages: the formula is low
        ((3, 1, 1), (3, 1, 1), 4, 24, 28),  # the slowest stage is first and hides the others: the formula is high
        ((1, 1, 3), (1, 1, 3), 4, 28, 28),
    ],
)
def test_closed_form_of_unbalanced_stages(
    forward: tuple[int, ...], backward: tuple[int, ...], microbatches: int, step: int, formula: int
) -> None:
    assert simulated(forward, backward, microbatches) == step
    assert one_f_one_b_seconds([f + b for f, b in zip(forward, backward)], microbatches) == formula
