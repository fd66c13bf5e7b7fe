"""Metrics of a step: losses and gradient norm, which a GPU's host reads only when they are asked for.

Reading a number from a GPU waits for all work before it. Doing so at the end of each step would leave the GPU idle
until the next step is launched. So a step on a GPU returns `LazyMetrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.engine.timer import Stopwatch
from autopar.runtime.spec import LazyMetrics, StepNumbers, UpdateResult
from autopar.schedule.actions import Action

MAX_SLOWDOWN = 20  # a step that takes longer than this many times the slowest one so far is taken for a hang
MAX_POLL_SECONDS = 1e-3  # between two looks at a GPU, at most; and at most a hundredth of the wait so far

StepMarks = Sequence[tuple[Action, Any, Any]]  # actions in order, with the marks of their start and end


@dataclass
class StepLimit:
    """Longest wait for a step: the run's timeout, or `MAX_SLOWDOWN` times the slowest step so far if that is longer."""

    timeout_seconds: float
    slowest_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.timeout_seconds, MAX_SLOWDOWN * self.slowest_seconds)

    def count(self, seconds: float) -> None:
        """Take the time of another step into account."""
        self.slowest_seconds = max(self.slowest_seconds, seconds)


def step_numbers(
    losses: torch.Tensor,
    update: UpdateResult | torch.Tensor | None,
    start: Any,
    stopwatch: Stopwatch,
    marks: StepMarks,
    limit: StepLimit,
) -> StepNumbers | LazyMetrics:
    """Metrics of a step that has just been launched; on a GPU lazy ones.

    The numbers are copied to the host in stream order, because the next step may overwrite ``losses`` and the norm.

    Args:
        losses: [microbatches of all replicas].
        update: the update's result, where the host knows it; else the global norm, a scalar; None without an update.
        start: stopwatch mark of the step's beginning.
        marks: marks of the step's actions.
        limit: of the wait for the numbers, which raises a TransportError that says where the GPU is.
    """
    count = len(losses)
    numbers = torch.cat([losses, update.to(losses.dtype).reshape(1)]) if isinstance(update, torch.Tensor) else losses

    def make_numbers(values: list[float], seconds: float | None) -> StepNumbers:
        step_losses, norm = values[:count], values[count:]
        if isinstance(update, UpdateResult):
            return StepNumbers(step_losses, update.grad_norm, update.skipped, seconds)
        return StepNumbers(step_losses, norm[0] if norm else None, False, seconds)

    if losses.device.type == "cpu":
        return make_numbers(numbers.tolist(), None)

    def wait(event: Any) -> None:
        wait_for_event(event, limit.seconds, lambda: gpu_position(marks, start))

    values, end = start_readback(numbers, wait), stopwatch.mark()

    def read() -> StepNumbers:
        numbers = make_numbers(values(), stopwatch.seconds(start, end))
        limit.count(numbers.device_seconds or 0.0)
        return numbers

    return read


def wait_for_event(event: Any, seconds: float, position: Callable[[], str]) -> None:
    """Wait until a GPU has reached an event.

    Args:
        seconds: longest wait.
        position: says in the error where the GPU is.

    Raises:
        TransportError: it has not in time. Most likely it waits for another rank.
    """
    start = time.monotonic()
    while not event.query():
        waited = time.monotonic() - start
        if waited > seconds:
            raise TransportError(f"a step has not ended on the GPU within {waited:.1f} s: {position()}")
        time.sleep(min(MAX_POLL_SECONDS, waited / 100))


def gpu_position(marks: StepMarks, start: Any) -> str:
    """Last action of a step that its GPU has finished and the action that it is in, as text.

    Args:
        start: event of the step's beginning.
    """
    if not start.query():
        return "it is in an earlier step"
    finished = [action for action, _, end in marks if is_reached(end, start)]
    following = marks[len(finished)][0] if len(finished) < len(marks) else "the reduction of gradients, or the update"
    return f"it has finished {finished[-1] if finished else 'no action'} and is in {following}"


def is_reached(event: Any, start: Any) -> bool:
    """Whether a GPU has reached an event of a step that began at the event ``start``, which it has reached.

    Every replay of a CUDA graph records the same events, so one that is reached may be that of an earlier replay.
    """
    try:
        return event.query() and start.elapsed_time(event) >= 0
    except RuntimeError:  # an event of a graph that has never come to it has no time
        return False


def start_readback(
    numbers: torch.Tensor, wait: Callable[[Any], None] = torch.cuda.Event.synchronize
) -> Callable[[], list[Any]]:
    """Start copying ``numbers`` [n] to the host; calling the result waits and returns them.

    Args:
        wait: waits for the event that follows the copy.
    """
    if numbers.device.type == "cpu":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[Any]:
        wait(copied)
        return copy.tolist()

    return read


def resolve(numbers: StepNumbers | LazyMetrics) -> StepNumbers:
    """Metrics on the host; waits for lazy ones."""
    return numbers if isinstance(numbers, StepNumbers) else numbers()
