"""Simulated schedules: spans by hand, replays, and the closed form of 1F1B."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.schedules import parse_schedule, replayed, sources

from autopar.errors import ScheduleError, UsageError
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import INTERLEAVED
from autopar.schedule.actions import Schedule
from autopar.schedule.generate import SCHEDULES, generate
from autopar.schedule.simulate import one_f_one_b_seconds, simulate

costs = st.integers(0, 9)
sizes = st.tuples(st.sampled_from([name for name in SCHEDULES if name != "zb-v"]), st.integers(1, 5), st.integers(1, 6))


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
        timeline = simulate(generate(name, Placement(pp, chunks), microbatches), forward, backward, transfers, sizes)
        assert replayed(name, pp, forward, backward, transfers, sizes) == timeline.step_seconds


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
            generate("1f1b", Placement(2), 2),
            ([1, 1], [2, 2], HOPS),
            "rank 0: 0F0@0-1 0F1@1-2 0B0@4.75-6.75 0B1@7.75-9.75\n"
            "rank 1: 1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5.5 1B1@5.5-7.5",
        ),
        (  # the second microbatch is half as large
            generate("1f1b", Placement(2), 2),
            ([1, 1], [2, 2], HOPS, [1, 0.5]),
            "rank 0: 0F0@0-1 0F1@1-1.5 0B0@4.75-6.75 0B1@6.75-7.75\nrank 1: 1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5 1B1@5-6",
        ),
        (  # a skip edge whose activation takes 5 s and whose gradient 3 s
            generate("1f1b", Placement(3), 1),
            ([1, 1, 1], [1, 1, 1], {(0, 2): 5.0, (2, 0): 3.0}),
            "rank 0: 0F0@0-1 0B0@11-12\nrank 1: 1F0@1-2 1B0@8-9\nrank 2: 2F0@6-7 2B0@7-8",
        ),
        (
            generate("forward-only", Placement(3), 2),
            ([1, 3, 1], [0, 0, 0]),
            "rank 0: 0F0@0-1 0F1@1-2\nrank 1: 1F0@1-4 1F1@4-7\nrank 2: 2F0@4-5 2F1@7-8",
        ),
    ],
)
def test_simulated_spans(schedule: Schedule, arguments: tuple, text: str) -> None:
    assert spans_text(schedule, *arguments) == text


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
        simulate(generate("1f1b", Placement(2), 2), *arguments)
    assert str(error.value) == message


@settings(max_examples=examples(200))
@given(sizes, st.data())
def test_spans_keep_to_ranks_and_arrivals(size: tuple[str, int, int], data: st.DataObject) -> None:
    """No rank works on two things at once, nothing starts before what it takes has arrived."""
    name, pp, microbatches = size
    per_stage = st.lists(costs, min_size=pp, max_size=pp)
    forward, backward, wgrad = data.draw(per_stage), data.draw(per_stage), data.draw(per_stage)
    delay = data.draw(st.integers(0, 3))
    transfers = {hop: float(delay) for i in range(pp - 1) for hop in ((i, i + 1), (i + 1, i))}
    both = [b + w for b, w in zip(backward, wgrad, strict=True)] if name == "zb-h1" else backward
    timeline = simulate(generate(name, Placement(pp), microbatches), forward, both, transfers, wgrad_seconds=wgrad)
    ends = {span.action: span.end_seconds for span in timeline.spans}
    for rank in range(pp):
        own = [span for span in timeline.spans if span.rank == rank]
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(own))
        for span in own:
            assert all(ends[a] + delay <= span.start_seconds for a in sources(span.action, pp - 1))
            seconds = {"F": forward, "W": wgrad}.get(span.action.kind, backward)[rank]
            assert span.end_seconds - span.start_seconds == seconds


def simulated(forward: Sequence[int], backward: Sequence[int], microbatches: int) -> float:
    return simulate(generate("1f1b", Placement(len(forward)), microbatches), forward, backward).step_seconds


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 20])
def test_closed_form_is_exact_for_balanced_stages(pp: int, microbatches: int) -> None:
    assert simulated([3] * pp, [5] * pp, microbatches) == one_f_one_b_seconds([8] * pp, microbatches)


@settings(max_examples=examples(400))
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


@settings(max_examples=examples(300))
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
