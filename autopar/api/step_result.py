"""Results of training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class StepResult:
    """What a training step did.

    On GPUs a step goes on after the call that launched it. Its numbers are then read when they are asked for, and that
    waits until the step is done: a loop that reads them a step later, or every few steps, never leaves a GPU idle.
    ``ready`` says whether they are there already, as they always are on CPU. An error that a GPU reports late is raised
    where they are read, or by the next call; a `NonFiniteLossWarning` is given there, at the latest when the second
    step after this one starts.
    """

    def __init__(self, numbers: StepMetrics | Callable[[], StepMetrics], outputs: Any = None) -> None:
        """Take the figures, or what waits for them."""
        self._numbers = numbers
        self.outputs = outputs  # the model's outputs in order, where they were asked for

    @property
    def ready(self) -> bool:
        """Whether reading the numbers waits for nothing any more."""
        return isinstance(self._numbers, StepMetrics)

    @property
    def loss(self) -> float:
        """The mean over the global batch."""
        return self.figures.loss

    @property
    def grad_norm(self) -> float | None:
        """The global 2-norm of the gradients before clipping; None where no update was made."""
        return self.figures.grad_norm

    @property
    def skipped(self) -> bool:
        """Whether float16 gradients overflowed.

        ``grad_norm`` is infinite then, the weights stay as they were and the loss scale is halved.
        """
        return self.figures.skipped

    @property
    def step_seconds(self) -> float:
        """How long it took: on CPU the call, on GPUs the work from the step's first to its last."""
        return self.figures.step_seconds

    @property
    def figures(self) -> StepMetrics:
        """All numbers; waits for them."""
        if not isinstance(self._numbers, StepMetrics):
            self._numbers = self._numbers()
        return self._numbers

    def __repr__(self) -> str:
        own = self.figures
        return (
            f"StepResult(loss={own.loss}, step_seconds={own.step_seconds}, grad_norm={own.grad_norm}, "
            f"outputs={self.outputs!r}, skipped={own.skipped})"
        )

    def __reduce__(self) -> tuple[type[StepResult], tuple[StepMetrics, Any]]:
        return StepResult, (self.figures, self.outputs)


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of a `StepResult`."""

    loss: float
    step_seconds: float
    grad_norm: float | None = None
    skipped: bool = False
