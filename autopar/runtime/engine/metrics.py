"""Metrics of a step: losses and gradient norm, which a GPU's host reads only when they are asked for.

Reading a number from a GPU waits for all work before it. Doing so at the end of each step would leave the GPU idle
until the next step is launched. So a step on a GPU returns `LazyMetrics`.
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
    """Metrics of a step that has just been launched; on a GPU lazy ones.

    The numbers are copied to the host in stream order, because the next step may overwrite ``losses`` and the norm.

    Args:
        losses: [microbatches of all replicas].
        update: the update's result, where the host knows it; else the global norm, a scalar; None without an update.
        start: stopwatch mark of the step's beginning.
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
    values, end = start_readback(numbers), stopwatch.mark()
    return lambda: make_numbers(values(), stopwatch.seconds(start, end))


def start_readback(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Start copying ``numbers`` [n] to the host; calling the result waits and returns them."""
    if numbers.device.type == "cpu":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[Any]:
        copied.synchronize()
        return copy.tolist()

    return read


def resolve(numbers: StepNumbers | LazyMetrics) -> StepNumbers:
    """Metrics on the host; waits for lazy ones."""
    return numbers if isinstance(numbers, StepNumbers) else numbers()
