"""What a step came to, as numbers: on a GPU they are read when they are asked for.

Reading a number from a GPU waits for all work before it. A rank that did so at the end of each step would leave its GPU
idle until the next one is launched, so a step leaves a `Reading` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.stopwatch import Stopwatch


@dataclass(frozen=True)
class StepNumbers:
    """What a training step came to.

    ``losses`` are those of all microbatches of all replicas, in the order of the global batch, each as its part of the
    mean; all ranks have them. ``grad_norm`` and ``skipped`` are as in `UpdateResult`; None and False where the weights
    were not to be updated. ``device_seconds`` is the time from the step's first work on this rank's GPU to its last;
    None on CPU.
    """

    losses: list[float]
    grad_norm: float | None = None
    skipped: bool = False
    device_seconds: float | None = None


Reading = Callable[[], StepNumbers]  # waits until the numbers are there; may be called again


@dataclass(frozen=True)
class Update:
    """What an update leaves on the device: the global norm before clipping; ``skipped`` as in `UpdateResult`."""

    norm: torch.Tensor
    skipped: bool = False


def numbers_of(losses: torch.Tensor, update: Update | None, start: Any, stopwatch: Stopwatch) -> StepNumbers | Reading:
    """The numbers of a step that has just been launched; on a GPU without waiting for it.

    They are copied at once, each step's into memory of its own: the next step may write over ``losses`` and the norm.

    Args:
        start: the stopwatch's mark from the step's beginning.
    """
    numbers = losses if update is None else torch.cat([losses, update.norm.to(losses.dtype).reshape(1)])
    count, skipped = len(losses), update is not None and update.skipped

    def told(values: list[float], seconds: float | None) -> StepNumbers:
        return StepNumbers(values[:count], values[count] if update is not None else None, skipped, seconds)

    if losses.device.type == "cpu":
        return told(numbers.tolist(), None)
    values, end = start_reading(numbers), stopwatch.mark()
    return lambda: told(values(), stopwatch.seconds(start, end))


def start_reading(numbers: torch.Tensor) -> Callable[[], list[Any]]:
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


def settled(numbers: StepNumbers | Reading) -> StepNumbers:
    """The numbers themselves; waits for them."""
    return numbers if isinstance(numbers, StepNumbers) else numbers()
