"""List scheduling: proofs of what it finds, its step against a bound of any order, and what it keeps."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.schedules import format_schedule

from autopar.errors import ScheduleError
from autopar.ir.placement import Placement
from autopar.ir.plan_parts import ListOrder
from autopar.schedule.actions import Action
from autopar.schedule.check import check
from autopar.schedule.generate import generate, in_flight_profiles, max_in_flight
from autopar.schedule.list_schedule import list_schedule
from autopar.schedule.simulate import simulate


def order_of(pp: int, chunks: int, times: tuple[int, int, int], hop: int, kept: int) -> ListOrder:
    """An order for equal chunks, of which each rank keeps the activations of so many."""
    forward, input_grad, wgrad = ((seconds,) * (pp * chunks) for seconds in times)
    return ListOrder(forward, input_grad, wgrad, hop, (kept,) * pp)


def step_seconds(order: ListOrder, pp: int, microbatches: int) -> float:
    chunks = len(order.forward)
    hops = {hop: float(order.hop) for s in range(chunks - 1) for hop in ((s, s + 1), (s + 1, s))}
    schedule = generate("searched", Placement(pp, chunks // pp), microbatches, order)
    backward = [float(i + w) for i, w in zip(order.input_grad, order.wgrad, strict=True)]
    return simulate(schedule, order.forward, backward, hops, wgrad_seconds=order.wgrad).step_seconds


def test_printed() -> None:
    order = order_of(2, 1, (1, 1, 1), 0, 2)
    assert (
        format_schedule(list_schedule(order, 2, 3))
        == """\
rank 0: 0F0 0F1 0I0 0W0 0I1 0F2 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2"""
    )
    twice = order_of(2, 2, (1, 1, 1), 0, 4)
    assert (
        format_schedule(list_schedule(twice, 2, 2))
        == """\
rank 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 0I0 0I1 2W1 0W0 0W1
rank 1: 1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1"""
    )


@settings(max_examples=examples(200))
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.data())
def test_every_order_is_proved_within_its_limit(pp: int, chunks: int, microbatches: int, data: st.DataObject) -> None:
    """Stages of any times, limits of any size from one activation a chunk and rank on."""
    per_chunk = st.lists(st.integers(0, 9), min_size=pp * chunks, max_size=pp * chunks).map(tuple)
    limits = data.draw(st.lists(st.integers(pp * chunks, 3 * pp * chunks), min_size=pp, max_size=pp))
    order = ListOrder(
        data.draw(per_chunk), data.draw(per_chunk), data.draw(per_chunk), data.draw(st.integers(0, 5)), tuple(limits)
    )
    schedule = generate("searched", Placement(pp, chunks), microbatches, order)
    bounds = [max_in_flight("searched", rank, Placement(pp, chunks), microbatches, order) for rank in range(pp)]
    check(schedule, Placement(pp, chunks), microbatches=microbatches, in_flight=bounds)
    for rank in range(pp):
        moments = in_flight_profiles("searched", rank, Placement(pp, chunks), microbatches, order)
        assert max(map(sum, moments)) <= bounds[rank]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 4])
def test_with_twice_the_activations_of_1f1b_hardly_any_order_is_shorter(pp: int, chunks: int) -> None:
    """The last rank begins when the first microbatch has passed the others; all are busy from then on."""
    for forward, input_grad, wgrad, hop in ((30, 30, 30, 0), (30, 33, 27, 1), (30, 36, 30, 1)):
        for microbatches in (2 * pp, 3 * pp + 1):
            order = order_of(pp, chunks, (forward, input_grad, wgrad), hop, 2 * pp * chunks)
            bound = microbatches * chunks * (forward + input_grad + wgrad) + (pp - 1) * (forward + hop)
            assert bound <= step_seconds(order, pp, microbatches) <= 1.005 * bound


def all_rows(rank: int, microbatches: int) -> list[tuple[Action, ...]]:
    """Every order of a rank's actions in which microbatches keep theirs."""
    found: list[tuple[Action, ...]] = []

    def grow(row: tuple[Action, ...], forwards: int, inputs: int, wgrads: int) -> None:
        if wgrads == microbatches:
            found.append(row)
        if forwards < microbatches:
            grow((*row, Action("F", rank, forwards)), forwards + 1, inputs, wgrads)
        if inputs < forwards:
            grow((*row, Action("I", rank, inputs)), forwards, inputs + 1, wgrads)
        if wgrads < inputs:
            grow((*row, Action("W", rank, wgrads)), forwards, inputs, wgrads + 1)

    grow((), 0, 0, 0)
    return found


def least_seconds(order: ListOrder, pp: int, microbatches: int) -> float:
    """The shortest step of all orders, by trying each."""
    hops = {hop: float(order.hop) for s in range(pp - 1) for hop in ((s, s + 1), (s + 1, s))}
    backward = [float(i + w) for i, w in zip(order.input_grad, order.wgrad, strict=True)]
    found = float("inf")
    for schedule in product(*(all_rows(rank, microbatches) for rank in range(pp))):
        with suppress(ScheduleError):  # the ranks wait for each other
            step = simulate(schedule, order.forward, backward, hops, wgrad_seconds=order.wgrad).step_seconds
            found = min(found, step)
    return found


def shorter_step(order: ListOrder, pp: int, microbatches: int) -> float:
    """The step of the better of the two rules."""
    return min(step_seconds(replace(order, alternates=rule), pp, microbatches) for rule in (True, False))


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 3), (3, 2)])
def test_no_order_of_equal_ranks_is_shorter(pp: int, microbatches: int) -> None:
    for seconds in product((2, 3), (2, 4), (1, 3)):
        order = order_of(pp, 1, seconds, 0, 2 * pp * microbatches)
        assert shorter_step(order, pp, microbatches) == least_seconds(order, pp, microbatches)


@settings(max_examples=examples(60))
@given(st.integers(2, 3), st.data())
def test_few_orders_of_unequal_ranks_are_shorter(microbatches: int, data: st.DataObject) -> None:
    numbers = st.tuples(st.integers(1, 9), st.integers(1, 9))
    order = ListOrder(data.draw(numbers), data.draw(numbers), data.draw(numbers), data.draw(st.integers(0, 2)), (6, 6))
    assert shorter_step(order, 2, microbatches) <= 1.2 * least_seconds(order, 2, microbatches)


def test_too_few_activations() -> None:
    with pytest.raises(ScheduleError) as error:
        list_schedule(order_of(2, 2, (1, 1, 1), 0, 1), 2, 2)
    assert str(error.value) == ("No order of 4 chunks on 2 ranks keeps at most (1, 1) activations. Allow more.")
