"""Generated schedules: printed orders, refused arguments, activations in flight, and the bubble."""

import operator
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import format_schedule, replayed

from autopar.errors import UsageError
from autopar.ir.placement import V_SHAPED, Placement, placement_of
from autopar.ir.plan_parts import FIXED_CHUNKS, INTERLEAVED, ScheduleName
from autopar.schedule.actions import Action
from autopar.schedule.check import check
from autopar.schedule.generate import SCHEDULES, generate, in_flight_profiles, max_in_flight, may_overlap
from autopar.schedule.simulate import simulate

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
    ("zb-h1", 1, 2): """\
rank 0: 0F0 0I0 0W0 0F1 0I1 0W1""",
    ("zb-h1", 3, 1): """\
rank 0: 0F0 0I0 0W0
rank 1: 1F0 1I0 1W0
rank 2: 2F0 2I0 2W0""",
    ("zb-h1", 3, 4): """\
rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
}


@pytest.mark.parametrize(("name", "pp", "microbatches"), PRINTED)
def test_generated(name: str, pp: int, microbatches: int) -> None:
    assert format_schedule(generate(name, Placement(pp), microbatches)) == PRINTED[name, pp, microbatches]


def test_every_schedule_of_a_plan_has_a_recipe() -> None:
    assert {*SCHEDULES, "searched"} == set(get_args(ScheduleName))
    assert {name for name in SCHEDULES if FIXED_CHUNKS.get(name) != 1} == {"forward-only", "zb-v", *INTERLEAVED}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: generate("gpip", Placement(2), 2),
            "No schedule is named 'gpip'. Known schedules: forward-only, gpipe, 1f1b, interleaved, "
            "interleaved-overlap, zb-h1, zb-v, searched. Did you mean gpipe?",
        ),
        (
            lambda: generate("?", Placement(2), 2),
            "No schedule is named '?'. Known schedules: forward-only, gpipe, 1f1b, interleaved, interleaved-overlap, "
            "zb-h1, zb-v, searched.",
        ),
        (lambda: generate("1f1b", Placement(0), 2), "Schedule 1f1b with pp=0: pp must be at least 1."),
        (
            lambda: max_in_flight("1f1b", 0, Placement(2), 0),
            "Schedule 1f1b with microbatches=0: microbatches must be at least 1.",
        ),
        (
            lambda: generate("interleaved", Placement(2, 0), 2),
            "Schedule interleaved with chunks=0: chunks must be at least 1.",
        ),
        (
            lambda: generate("gpipe", Placement(2, 2), 2),
            "Schedule gpipe with chunks=2: each rank has 1. Use interleaved, interleaved-overlap, zb-v, "
            "searched, or chunks=1.",
        ),
        (
            lambda: generate("zb-v", placement_of("zb-v", 2, 3), 2),
            "Schedule zb-v with chunks=3: each rank has 2. Use interleaved, interleaved-overlap, searched, or "
            "chunks=2.",
        ),
        (
            lambda: max_in_flight("1f1b", 2, Placement(2), 1),
            "Rank 2 is not in a pipeline of 2 ranks. Give a rank from 0 to 1.",
        ),
    ],
)
def test_generate_refuses(call, message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value) == message


ONE_CHUNK = [name for name in SCHEDULES if name not in V_SHAPED]


@pytest.mark.parametrize("name", ONE_CHUNK)
@pytest.mark.parametrize("pp", range(1, 9))
def test_generated_schedules_pass_and_reach_their_bound(name: str, pp: int) -> None:
    for microbatches in range(1, 13):
        schedule = generate(name, Placement(pp), microbatches)
        bounds = tuple(max_in_flight(name, rank, Placement(pp), microbatches) for rank in range(pp))
        training = name != "forward-only"
        check(schedule, Placement(pp), microbatches=microbatches, in_flight=bounds, training=training)
        assert simulate(schedule, [1.0] * pp, [2.0] * pp).in_flight == bounds


@pytest.mark.parametrize("name", ONE_CHUNK)
def test_generated_schedules_pass_with_every_skip(name: str) -> None:
    for pp, microbatches in ((3, 5), (4, 2), (5, 7)):
        edges = [(src, dst) for dst in range(pp) for src in range(dst)]
        check(
            generate(name, Placement(pp), microbatches),
            Placement(pp),
            microbatches=microbatches,
            edges=edges,
            training=name != "forward-only",
        )


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
    schedule = generate("interleaved", Placement(pp, chunks), microbatches)
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
    schedule = generate("interleaved-overlap", Placement(pp, chunks), microbatches)
    assert format_schedule(schedule) == OVERLAP_ORDERS[pp, microbatches, chunks]


def test_megatrons_order() -> None:
    """Forward number k of a rank is of chunk k mod (p·v) div p, the warm-up 2·(p - rank - 1) + (v - 1)·p of them."""
    pp, chunks, microbatches = 4, 3, 12
    for rank, row in enumerate(generate("interleaved", Placement(pp, chunks), microbatches)):
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
            assert generate(name, Placement(pp), microbatches) == generate("1f1b", Placement(pp), microbatches)


@pytest.mark.parametrize("name", [*INTERLEAVED, "forward-only"])
@pytest.mark.parametrize("chunks", range(1, 5))
@pytest.mark.parametrize("pp", range(1, 7))
def test_interleaved_schedules_pass_and_reach_their_bound(pp: int, chunks: int, name: str) -> None:
    training, placement = name != "forward-only", Placement(pp, chunks)
    for microbatches in range(1, 15):
        schedule = generate(name, placement, microbatches)
        bounds = tuple(max_in_flight(name, rank, placement, microbatches) for rank in range(pp))
        for edges in (None, [(src, dst) for dst in range(pp * chunks) for src in range(dst)]):
            check(schedule, placement, microbatches=microbatches, edges=edges, in_flight=bounds, training=training)
        stages = [1.0] * (pp * chunks)
        timeline = simulate(schedule, stages, stages)
        assert timeline.in_flight == bounds
        for rank in range(pp):
            moments = in_flight_profiles(name, rank, placement, microbatches)
            assert max(map(sum, moments)) == sum(moments[0]) == bounds[rank]
            assert not any(all(map(operator.le, a, b)) for a in moments for b in moments if a != b)


@pytest.mark.parametrize("name", INTERLEAVED)
@pytest.mark.parametrize("chunks", range(2, 5))
@pytest.mark.parametrize("pp", range(1, 7))
def test_the_bubble_of_equal_chunks(pp: int, chunks: int, name: str) -> None:
    """(p - 1) / (v · m) of the busy time, also where p does not divide m; never longer than 1F1B of the same work."""
    for microbatches in range(1, 15):
        schedule = generate(name, Placement(pp, chunks), microbatches)
        seconds = simulate(schedule, [1.0] * (pp * chunks), [2.0] * (pp * chunks)).step_seconds
        busy = 3.0 * chunks * microbatches
        if microbatches >= pp:
            assert seconds == pytest.approx(busy * (1 + (pp - 1) / (chunks * microbatches)))
        else:  # the pipeline is never full: one microbatch passes it, the others follow
            assert seconds == pytest.approx(3.0 * (pp * chunks + microbatches - 1))
        plain = simulate(generate("1f1b", Placement(pp), microbatches), [chunks * 1.0] * pp, [chunks * 2.0] * pp)
        assert seconds <= plain.step_seconds + 1e-9


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(4, 3, 8), (8, 6, 16), (8, 2, 32)])
def test_waits_for_messages(pp: int, chunks: int, microbatches: int) -> None:
    """With equal stages a step takes as many messages longer as `message_seconds` counts."""
    ones, pairs = [1.0] * (pp * chunks), [(s, s + 1) for s in range(pp * chunks - 1)]
    hops = dict.fromkeys(pairs + [(b, a) for a, b in pairs], 0.125)
    for name, waited in (("interleaved", pp - 1 + (chunks - 1) * pp), ("interleaved-overlap", pp - 1)):
        schedule = generate(name, Placement(pp, chunks), microbatches)
        step, free = simulate(schedule, ones, ones, hops), simulate(schedule, ones, ones)
        assert step.step_seconds == free.step_seconds + 2 * waited * 0.125


@pytest.mark.parametrize("chunks", range(2, 7))
@pytest.mark.parametrize("pp", range(2, 7))
def test_overlap_hides_transfers(pp: int, chunks: int) -> None:
    """Where a round around the ranks takes no longer than a group's forwards, the pipeline's filling and its emptying
    are all that transfers add to a step, whatever the number of chunks; under interleaved every round adds one."""
    stages, transfer = pp * chunks, 1.0 / pp
    hops = {hop: transfer for s in range(stages - 1) for hop in ((s, s + 1), (s + 1, s))}
    for microbatches in range(1, 25):

        def seconds(name: str, hops: dict[tuple[int, int], float], microbatches: int = microbatches) -> float:
            return replayed(name, pp, [1.0] * stages, [2.0] * stages, hops, [1.0] * microbatches)

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
        name: [replayed(name, 4, [0.9] * 24, [1.45] * 24, t, [1.0] * 8) for t in (hops, {})] for name in INTERLEAVED
    }
    assert found["interleaved"] == pytest.approx([123.99, 119.85])
    assert found["interleaved-overlap"] == pytest.approx([120.39, 119.85])
    assert [max_in_flight(name, 0, Placement(4, 6), m) for m in (8, 16) for name in INTERLEAVED] == [27, 47, 27, 37]


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 40))
def test_overlap_is_another_order_only_where_it_says_so(pp: int, chunks: int, microbatches: int) -> None:
    plain, overlap = (generate(name, Placement(pp, chunks), microbatches) for name in INTERLEAVED)
    assert (plain != overlap) == may_overlap(pp, microbatches)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
def test_interleaved_with_equal_stages_is_never_longer_than_1f1b(
    pp: int, chunks: int, microbatches: int, forward: int, backward: int, data: st.DataObject
) -> None:
    last = data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    factors = [1.0] * (microbatches - 1) + [last if microbatches > 1 else 1.0]
    name = data.draw(st.sampled_from(INTERLEAVED))
    seconds = {
        n: replayed(name, pp, [forward / n] * (pp * n), [backward / n] * (pp * n), {}, factors) for n in (1, chunks)
    }
    assert seconds[chunks] <= seconds[1] * (1 + 1e-9)


def test_the_bubble_of_zb_h1() -> None:
    """(p - 1) · (F + I - W), with no more activations than 1F1B's first rank."""
    for pp in range(1, 7):
        for microbatches in range(2 * pp, 3 * pp):
            schedule = generate("zb-h1", Placement(pp), microbatches)
            timeline = simulate(schedule, [2.0] * pp, [5.0] * pp, wgrad_seconds=[2.0] * pp)
            assert timeline.step_seconds == microbatches * 7.0 + (pp - 1) * 3.0
            assert timeline.in_flight == (pp,) * pp == (max_in_flight("1f1b", 0, Placement(pp), microbatches),) * pp


V_ORDERS = {
    (1, 2): """\
rank 0: 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1""",
    (2, 1): """\
rank 0: 0F0 3F0 3I0 3W0 0I0 0W0
rank 1: 1F0 2F0 2I0 2W0 1I0 1W0""",
    (2, 4): """\
rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3""",
}


@pytest.mark.parametrize(("pp", "microbatches"), V_ORDERS)
def test_zb_v(pp: int, microbatches: int) -> None:
    assert format_schedule(generate("zb-v", placement_of("zb-v", pp, 2), microbatches)) == V_ORDERS[pp, microbatches]


@pytest.mark.parametrize("pp", range(1, 8))
def test_schedules_in_a_v_pass_and_reach_their_bound(pp: int) -> None:
    every_skip = [(src, dst) for dst in range(2 * pp) for src in range(dst)]
    placement = placement_of("zb-v", pp, 2)
    for microbatches, edges in product(range(1, 18), (None, every_skip)):
        schedule = generate("zb-v", placement, microbatches)
        bounds = tuple(max_in_flight("zb-v", rank, placement, microbatches) for rank in range(pp))
        check(schedule, placement, microbatches=microbatches, edges=edges, in_flight=bounds)
        profiles = (in_flight_profiles("zb-v", rank, placement, microbatches) for rank in range(pp))
        assert tuple(max(map(sum, moments)) for moments in profiles) == bounds
        forwards = generate("forward-only", placement, microbatches)
        check(forwards, placement, microbatches=microbatches, edges=edges, training=False)


def test_the_bubble_of_zb_v() -> None:
    """Only the first forwards of the ranks before, with the memory of 1F1B: its stages are twice as large."""
    for pp in range(1, 7):
        for microbatches in range(2 * pp - 1, 3 * pp + 2):
            schedule = generate("zb-v", placement_of("zb-v", pp, 2), microbatches)
            timeline = simulate(schedule, [1.0] * 2 * pp, [2.0] * 2 * pp, wgrad_seconds=[1.0] * 2 * pp)
            assert timeline.step_seconds == 6.0 * microbatches + pp - 1
            assert timeline.in_flight == (2 * max_in_flight("1f1b", 0, Placement(pp), microbatches),) * pp
