"""A row of a bench: one variant of one baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from autopar.tools.bench.timeline import MeasuredTimeline


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
        timeline: a measured step; None in older files.
    """

    plan: str
    bubble_predicted: float
    bubble_measured: float
    bound_seconds: float
    predicted_seconds: float
    predicted_bytes: tuple[int, ...]
    tensor_bytes: tuple[int, ...] = ()
    timeline: MeasuredTimeline | None = None


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


class BenchView(Protocol):
    """Fields of `autopar.tools.bench.result.BenchResult`, which imports the modules that print them."""

    @property
    def model(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def precision(self) -> str: ...
    @property
    def channels_last(self) -> bool: ...
    @property
    def plan(self) -> str: ...
    @property
    def flops_per_image(self) -> float: ...
    @property
    def warmup(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def memory(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def best(self) -> tuple[BenchRow, ...]: ...
