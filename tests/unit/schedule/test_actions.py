"""Text of actions and schedules: printed, parsed, and shown with marked cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule.actions import Action, Schedule, format_grid, format_schedule, parse_schedule
from autopar.schedule.generate import generate

numbers = st.integers(0, 10**6)
actions = st.builds(Action, st.sampled_from(["F", "B"]), numbers, numbers)
schedules = st.lists(st.lists(actions, max_size=5).map(tuple), max_size=5).map(tuple)


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
