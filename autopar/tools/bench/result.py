"""The result of a bench: a row for each contestant and variant, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PipelineResult:
    """What is known of a contestant that runs a plan.

    Args:
        bubble_predicted: share of the step, by the planner.
        bubble_measured: share of the ranks' time in which no action ran.
        bound_seconds: the step if nothing cost time but the measured actions, in the schedule's order.
        predicted_seconds, predicted_bytes: of the step, and of each rank's peak.
        tensor_bytes: measured most bytes in tensors, by rank; empty where the allocator's peak says it.
    """

    plan: str
    bubble_predicted: float
    bubble_measured: float
    bound_seconds: float
    predicted_seconds: float
    predicted_bytes: tuple[int, ...]
    tensor_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class BenchRow:
    """One contestant in one variant.

    Args:
        title, label: as people call it, and what is special about the variant.
        step_seconds: every timed step, each that of its slowest rank.
        losses: mean loss of every step, warm-up included.
        peak_bytes: by rank.
        reason: why there are no figures.
        best: whether it is the fastest variant of its contestant.
    """

    contestant: str
    title: str
    label: str
    about: str
    devices: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
    median_seconds: float | None = None
    samples_per_second: float | None = None
    tflops_per_device: float | None = None
    peak_bytes: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    pipeline: PipelineResult | None = None
    reason: str | None = None
    note: str = ""
    best: bool = True

    @property
    def of_bound(self) -> float | None:
        """Share of the bubble bound that was reached."""
        if self.pipeline is None or self.median_seconds is None:
            return None
        return self.pipeline.bound_seconds / self.median_seconds


@dataclass(frozen=True)
class BenchResult:
    """What was measured on which machine. ``memory`` says what ``peak_bytes`` of the rows are."""

    model: str
    model_kwargs: Mapping[str, Any]
    shape: tuple[int, ...]
    devices: int
    precision: str
    channels_last: bool
    compiled: bool
    plan: str
    flops_per_image: float
    warmup: int
    steps: int
    seed: int
    memory: str
    machine: str
    torch: str
    autopar: str
    commit: str | None
    command: str
    rows: tuple[BenchRow, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def best(self) -> tuple[BenchRow, ...]:
        """A row for each contestant."""
        return tuple(row for row in self.rows if row.best)

    def row(self, contestant: str) -> BenchRow:
        """A contestant's best variant."""
        return next(row for row in self.best if row.contestant == contestant)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def timed_row(
    row: dict[str, Any],
    seconds: tuple[float, ...],
    batch: int,
    flops_per_image: float,
    **measured: Any,
) -> BenchRow:
    """A row with what follows from its step times: unique images per second, whatever each rank sees of them."""
    middle = median(seconds)
    rate = batch / middle
    return BenchRow(
        **row,
        step_seconds=seconds,
        median_seconds=middle,
        samples_per_second=rate,
        tflops_per_device=flops_per_image * rate / row["devices"] / 1e12,
        **measured,
    )
