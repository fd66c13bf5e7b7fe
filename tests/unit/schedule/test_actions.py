"""Text of actions and schedules: printed, and shown with marked cells."""

from autopar.ir.placement import Placement
from autopar.schedule.actions import Action, format_grid
from autopar.schedule.generate import generate


def test_action_text() -> None:
    assert str(Action("F", 2, 0)) == "2F0" and str(Action("B", 10, 37)) == "10B37"


def test_grid_shows_a_window_of_long_rows() -> None:
    grid = format_grid(generate("forward-only", Placement(2), 100), [(1, 50)])
    assert [line.split() for line in grid.splitlines()] == [
        ["rank", "0:", "…", *(f"0F{i}" for i in range(38, 62)), "…"],
        ["rank", "1:", "…", *(f"[1F{i}]" if i == 50 else f"1F{i}" for i in range(38, 62)), "…"],
    ]
