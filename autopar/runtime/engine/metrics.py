"""What a step came to, as numbers: on a GPU they are read when they are asked for.

Reading a number from a GPU waits for all work before it. A rank that did so at the end of each step would leave its GPU
idle until the next one is launched, so a step leaves a `Reading` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.runtime.engine.timer import Stopwatch
from autopar.runtime.spec import LazyMetrics, StepNumbers, UpdateResult


def step_numbers(
    losses: torch.Tensor, update: UpdateResult | torch.Tensor | None, start: Any, stopwatch: Stopwatch
) -> StepNumbers | LazyMetrics:
    """The numbers of a step that has just been launched; on a GPU without waiting for it.

    They are copied at once, each step's into memory of its own: the next step may write over ``losses`` and the norm.

    Args:
        update: what became of it, where the host knows that; else the global norm; None for no update.
        start: the stopwatch's mark from the step's beginning.
    """
    count = len(losses)
    numbers = torch.cat([losses, update.to(losses.dtype).reshape(1)]) if isinstance(update, torch.Tensor) else losses

    def told(values: list[float], seconds: float | None) -> StepNumbers:
        own, norm = values[:count], values[count:]
        if isinstance(update, UpdateResult):
            return StepNumbers(own, update.grad_norm, update.skipped, seconds)
        return StepNumbers(own, norm[0] if norm else None, False, seconds)

    if losses.device.type == "cpu":
        return told(numbers.tolist(), None)
    values, end = start_readback(numbers), stopwatch.mark()
    return lambda: told(values(), stopwatch.seconds(start, end))


def start_readback(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Start bringing the numbers of a vector to the host; the result waits until they are there."""
    if numbers.device.type == "cpu":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[Any]:
        there.synchronize()
        return copy.tolist()

    return read


def resolve(numbers: StepNumbers | LazyMetrics) -> StepNumbers:
    """The numbers themselves; waits for them."""
    return numbers if isinstance(numbers, StepNumbers) else numbers()
