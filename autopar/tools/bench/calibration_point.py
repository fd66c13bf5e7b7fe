"""Predicted and measured cost of one plan, and errors of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from pydantic import with_config

from autopar.ir.mesh import STRICT, Mesh
from autopar.ir.plan_parts import PriceSource


@with_config(STRICT)
@dataclass(frozen=True)
class CalibrationPoint:
    """One plan: predicted and measured time of a step, and peak memory of each rank.

    Args:
        parts: parts of the plan's step that run on one device, such as ``matmul bfloat16``; empty in older files.
    """

    model: str
    batch: int
    precision: str
    plan: str
    mesh: Mesh
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    parts: tuple[str, ...] = ()

    @property
    def time_error(self) -> float:
        """Error of the predicted step time, relative to the measured one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """Error of each rank's predicted peak, relative to the measured one."""
        return tuple(p / m - 1 for p, m in zip(self.predicted_bytes, self.measured_bytes, strict=True))

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Identifies the plan: a later measurement of it replaces this one."""
        return self.model, self.batch, self.precision, self.plan


@dataclass(frozen=True)
class ErrorBand:
    """Median and largest absolute value of relative errors."""

    median: float
    worst: float

    @staticmethod
    def of(errors: Sequence[float]) -> ErrorBand:
        sizes = [abs(error) for error in errors]
        return ErrorBand(median(sizes), max(sizes))


class CalibrationView(Protocol):
    """Fields of `autopar.tools.bench.calibration.Calibration`, which imports the modules that print them."""

    @property
    def machine(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    @property
    def cost(self) -> PriceSource: ...
    @property
    def memory(self) -> str: ...
    @property
    def points(self) -> tuple[CalibrationPoint, ...]: ...
    @property
    def time(self) -> ErrorBand: ...
    @property
    def peaks(self) -> ErrorBand: ...
