"""Results of training steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from autopar.api.module_attributes import OF_RESULT, missing_attribute
from autopar.ir.units import TIME, text

# Steps that may be launched before the first of them is done: one computes while the next is prepared. More would hold
# more inputs in memory, and report errors further from their cause.
MAX_STEPS_IN_FLIGHT = 2


class StepResult:
    """Result of a training step: its loss, gradient norm and time, and the model's outputs if they were kept.

    On GPUs a step is still running when the call that launched it returns. Reading a number waits until the step is
    done; a loop that reads numbers one step later, or every few steps, never leaves a GPU idle. ``ready`` says whether
    reading waits; on CPU it never does. An error that a GPU reports late is raised by the read, or by the next call. A
    `NonFiniteLossWarning` is given by the read, or when the second step after this one starts. Any thread may read.
    """

    def __init__(self, numbers: StepMetrics | Callable[[], StepMetrics], outputs: Any = None) -> None:
        """Take the metrics, or a function that waits for them."""
        self._numbers = numbers
        self._lock = threading.RLock()
        self.outputs = outputs  # the model's outputs in the order of the batch; None unless they were kept

    @property
    def ready(self) -> bool:
        """Whether reading the numbers returns without waiting."""
        return isinstance(self._numbers, StepMetrics)

    @property
    def loss(self) -> float:
        """Mean loss over the global batch."""
        return self.figures.loss

    @property
    def grad_norm(self) -> float | None:
        """Global 2-norm of the gradients before clipping; None if the weights were not updated."""
        return self.figures.grad_norm

    @property
    def skipped(self) -> bool:
        """Whether float16 gradients overflowed.

        If so, ``grad_norm`` is infinite, the weights are unchanged and the loss scale is halved.
        """
        return self.figures.skipped

    @property
    def step_seconds(self) -> float:
        """Duration of the step, second: of the call on CPU, from the first to the last kernel on GPUs."""
        return self.figures.step_seconds

    @property
    def figures(self) -> StepMetrics:
        """All numbers of the step; waits until it is done."""
        if not isinstance(self._numbers, StepMetrics):
            with self._lock:  # another thread may have read them meanwhile
                self._numbers = self._numbers if isinstance(self._numbers, StepMetrics) else self._numbers()
        return self._numbers

    def __repr__(self) -> str:
        own = self.figures
        return (
            f"StepResult(loss={own.loss}, step_seconds={own.step_seconds}, grad_norm={own.grad_norm}, "
            f"outputs={self.outputs!r}, skipped={own.skipped})"
        )

    def _repr_html_(self) -> str:
        """The numbers, as notebooks show them; waits until the step is done."""
        from autopar.ir.html import html_of  # slow: imports rich
        from autopar.ir.text import labelled

        own = self.figures
        rows = [("loss", f"{own.loss:.6g}"), ("step", text(own.step_seconds, TIME))]
        if own.grad_norm is not None:
            rows.insert(1, ("gradient norm", f"{own.grad_norm:.4g}"))
        if own.skipped:
            rows.append(("skipped", "gradients overflowed: the weights are unchanged, the loss scale is halved"))
        return html_of([labelled(rows)])

    def __reduce__(self) -> tuple[type[StepResult], tuple[StepMetrics, Any]]:
        return StepResult, (self.figures, self.outputs)

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise missing_attribute(self, name, OF_RESULT)


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of a `StepResult`."""

    loss: float
    step_seconds: float
    grad_norm: float | None = None
    skipped: bool = False
