"""The result of a bench: one row per baseline and variant; a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PipelineResult:
    """Bubble, prediction and memory of a baseline that runs a plan.

    Args:
        bubble_predicted: share of the step, by the planner.
        bubble_measured: share of the ranks' time in which no action ran.
        bound_seconds: the step if only the measured actions took time, in the schedule's order.
        predicted_seconds: of a step.
        predicted_bytes: peak of each rank.
        tensor_bytes: measured peak of bytes in tensors by rank; empty on GPUs, where the allocator's peak is that, and
            in compiled code.
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
    """One variant of one baseline.

    Args:
        contestant: name of the baseline; the key in result files.
        title: of the baseline, in tables.
        label: of the variant.
        about: description of the baseline.
        settings: of the variant.
        step_seconds: of every timed step, on its slowest rank.
        losses: mean loss of every step, warm-up included.
        peak_bytes: by rank.
        first_step_seconds: from the start of building to the end of the first step, on the slowest rank; 0 if no step
            was untimed. Planning does not count, compilation does, as far as torch's caches on disk do not have it.
        reason: why there are no measurements.
        note: on losses that differ from the reference's.
        best: whether this is the fastest variant of its baseline.
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
    first_step_seconds: float = 0.0
    losses: tuple[float, ...] = ()
    pipeline: PipelineResult | None = None
    reason: str | None = None
    note: str = ""
    best: bool = True

    def with_seconds(self, seconds: tuple[float, ...], batch: int, flops_per_image: float) -> BenchRow:
        """This row with step times and the rates that follow from them.

        Args:
            batch: images of the global batch; each counts once, even if several ranks compute on it.
        """
        median_seconds = median(seconds)
        rate = batch / median_seconds
        return replace(
            self,
            step_seconds=seconds,
            median_seconds=median_seconds,
            samples_per_second=rate,
            tflops_per_device=flops_per_image * rate / self.devices / 1e12,
        )

    @property
    def of_bound(self) -> float | None:
        """The bubble bound as a share of the measured step."""
        if self.pipeline is None or self.median_seconds is None:
            return None
        return self.pipeline.bound_seconds / self.median_seconds


@dataclass(frozen=True)
class BenchResult:
    """Rows, and the model, machine and versions that they hold for.

    Args:
        memory: what ``peak_bytes`` of the rows count.
    """

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
        """The fastest row of each baseline."""
        return tuple(row for row in self.rows if row.best)

    def row(self, baseline: str) -> BenchRow:
        """The fastest row of a baseline."""
        return next(row for row in self.best if row.contestant == baseline)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"
