"""Timelines: their numbers and their printed form."""

import pytest

from autopar.ir.placement import Placement
from autopar.schedule.generate import generate
from autopar.schedule.simulate import simulate

HOPS = {(0, 1): 0.5, (1, 0): 0.25}


def test_timeline_numbers() -> None:
    timeline = simulate(generate("1f1b", Placement(2), 2), [1, 1], [2, 2], HOPS)
    assert timeline.step_seconds == 9.75
    assert timeline.busy_seconds == (6, 6)
    assert timeline.bubble_fraction == 1 - 6 / 9.75
    assert timeline.in_flight == (2, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_balanced_stages(name: str) -> None:
    timeline = simulate(generate(name, Placement(4), 8), [1.0] * 4, [2.0] * 4)
    assert timeline.bubble_fraction == pytest.approx(3 / 11)
    assert timeline.step_seconds / timeline.busy_seconds[0] - 1 == pytest.approx(0.375)


def test_timeline_text() -> None:
    assert (
        str(simulate(generate("1f1b", Placement(3), 4), [0.001] * 3, [0.002] * 3))
        == """\
step 18.000 ms, bubble 33.3% of it, activations in flight 3 2 1
rank 0: F0--F1--F2--................B0------F3--B1------....B2------....B3------|  67%
rank 1: ....F0--F1--........B0------F2--B1------F3--B2------....B3------........|  67%
rank 2: ........F0--B0------F1--B1------F2--B2------F3--B3------................|  67%"""
    )


def test_timeline_text_of_a_long_step_keeps_to_100_columns() -> None:
    lines = str(simulate(generate("1f1b", Placement(12), 200), [1.0] * 12, [2.0] * 12)).splitlines()
    assert {len(line) for line in lines[1:]} == {100}


def test_timeline_text_of_a_step_without_duration() -> None:
    assert str(simulate(generate("gpipe", Placement(1), 1), [0], [0])) == (
        "step 0.000 ms, bubble 0.0% of it, activations in flight 1\nrank 0: |   0%"
    )
