"""Waits for the numbers of a step on a GPU, with events that need none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.engine.metrics import StepLimit, gpu_position, wait_for_event
from autopar.schedule.actions import Action

ACTIONS = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0)]


@dataclass
class Event:
    """Reached at ``seconds``; at no time if that is None. ``polls``: looks until it is reached."""

    seconds: float | None = None
    polls: int = 0

    def query(self) -> bool:
        self.polls -= 1
        return self.seconds is not None and self.polls < 0

    def elapsed_time(self, later: Event) -> float:
        assert self.seconds is not None and later.seconds is not None
        return later.seconds - self.seconds


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([None, None, None], "it has finished no action and is in 0F0"),
        ([6.0, None, None], "it has finished 0F0 and is in 0F1"),
        ([6.0, 3.0, 4.0], "it has finished 0F0 and is in 0F1"),  # the others are of an earlier replay
        ([6.0, 7.0, 8.0], "it has finished 0B0 and is in the reduction of gradients, or the update"),
    ],
)
def test_where_a_gpu_is(ends: list[float | None], expected: str) -> None:
    marks: Any = [(action, None, Event(end)) for action, end in zip(ACTIONS, ends, strict=True)]
    assert gpu_position(marks, Event(5.0)) == expected
    assert gpu_position(marks, Event()) == "it is in an earlier step"


def test_a_wait_ends_with_the_event_or_with_an_error_that_says_where_the_gpu_is() -> None:
    wait_for_event(Event(1.0, polls=50), 60.0, lambda: "")
    with pytest.raises(TransportError, match=r"a step has not ended on the GPU within 0\.\d s: it is in 0F1"):
        wait_for_event(Event(), 0.05, lambda: "it is in 0F1")


def test_the_limit_follows_the_slowest_step() -> None:
    limit = StepLimit(10.0)
    assert limit.seconds == 10.0
    for seconds in (2.0, 1.0):
        limit.count(seconds)
    assert limit.seconds == 40.0
