"""Kernels of profiled training steps, read from torch.profiler's Chrome trace."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "autopar bench step"
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of events that keep the device busy
ON_HOST = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class KernelEvent:
    """One kernel, or a copy, which has no grid. ``start_seconds`` count from the host's start of the first step."""

    name: str
    grid: tuple[int, ...]
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


@dataclass(frozen=True)
class ProfiledStep:
    """Kernels of one step in the order of their starts, and whether the step was replayed from a CUDA graph."""

    kernels: tuple[KernelEvent, ...]
    captured: bool

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one kernel ran."""
        busy, end = 0.0, 0.0
        for kernel in self.kernels:
            busy += max(0.0, kernel.end_seconds - max(end, kernel.start_seconds))
            end = max(end, kernel.end_seconds)
        return busy

    @property
    def span_seconds(self) -> float:
        """Time from the start of the first kernel to the end of the last one."""
        return max(k.end_seconds for k in self.kernels) - self.kernels[0].start_seconds


def profile_steps(step: Callable[[], object], count: int, device: torch.device) -> tuple[ProfiledStep, ...]:
    """Kernels of ``count`` steps, after one that takes the profiler's start-up.

    The device is idle between two steps, so that each kernel lies within the host's time of its step. All steps are in
    one profile: CUPTI, once stopped, may see no kernels of a CUDA graph.
    """
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        for _ in range(count + 1):
            with record_function(STEP):
                step()
                torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    return profiled_steps(events)[1:]


def profiled_steps(events: Iterable[Mapping[str, Any]]) -> tuple[ProfiledStep, ...]:
    """Steps of a Chrome trace whose steps on the host are annotated by `STEP`. Times in the trace are in µs."""
    slices = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"]))
    starts = [float(e["ts"]) for e in slices if e.get("cat") == "user_annotation" and e["name"] == STEP]
    kernels: list[list[KernelEvent]] = [[] for _ in starts]
    captured = [False] * len(starts)
    for event in slices:
        start, category = float(event["ts"]), event.get("cat")
        number = bisect_right(starts, start) - 1
        if number < 0:
            continue
        if category in ON_DEVICE:
            grid = tuple(int(size) for size in event.get("args", {}).get("grid", ()))
            seconds = (start - starts[0]) / 1e6
            kernels[number].append(KernelEvent(event["name"], grid, seconds, float(event["dur"]) / 1e6))
        elif category in ON_HOST and "GraphLaunch" in event["name"]:
            captured[number] = True
    return tuple(ProfiledStep(tuple(k), c) for k, c in zip(kernels, captured, strict=True))
