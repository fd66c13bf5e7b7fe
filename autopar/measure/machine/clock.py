"""Medians over repeats: of the host's clock on CPU, of CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

Workload = Callable[[], object]
SAMPLE_SECONDS = {"cpu": 4e-3, "cuda": 2e-3}  # of one repeat, so that the clock's own steps do not count
REPEATS, LONG_RUN_REPEATS = 9, 5
LONG_RUN_SECONDS = 0.15  # of one run: fewer repeats of these
MAX_INNER = 2000
# A GPU that computes for longer than this reaches its power limit and lowers its clock, as it does in training: of
# kernels that compute as much as this, what counts is the time after it.
BUSY_SECONDS, BUSY_FLOPS = 0.3, 1e10


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run, and what lies between the quartiles, as a share of it."""

    seconds: float
    spread: float


def timing_from_samples(samples: Sequence[float]) -> Timing:
    """Of the seconds of several repeats."""
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return Timing(float(middle), float((high - low) / middle))


def single_run_seconds(run: Workload, device: torch.device) -> float:
    """Time of one run with everything around it, to choose how many make a repeat."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def inner_runs(seconds: float, device: torch.device) -> int:
    """How many runs make one repeat."""
    return min(MAX_INNER, max(1, ceil(SAMPLE_SECONDS[device.type] / max(seconds, 1e-9))))


def time_eager(runs: Sequence[Workload], device: torch.device) -> Timing:
    """Time of one of several equal runs on data of their own, launched as any Python launches them."""
    runs[0]()
    if single_run_seconds(runs[0], device) > LONG_RUN_SECONDS:  # its data need not be in memory for that
        return time_repeats(runs[:1], device, 1, LONG_RUN_REPEATS)
    for run in runs[1:]:
        run()
    return time_repeats(runs, device, inner_runs(min(single_run_seconds(runs[0], device) for _ in range(2)), device))


def time_repeats(runs: Sequence[Workload], device: torch.device, inner: int, repeats: int = REPEATS) -> Timing:
    """The same in so many rows of ``inner`` runs: ranks that communicate have to run equally often."""
    return timing_from_samples([mean_seconds(runs, inner, device) for _ in range(repeats)])


def mean_seconds(runs: Sequence[Workload], inner: int, device: torch.device) -> float:
    """Seconds of one run in a row of ``inner``."""
    if device.type == "cuda":
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begun.record()
        for i in range(inner):
            runs[i % len(runs)]()
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3 / inner
    start = time.perf_counter()
    for i in range(inner):
        runs[i % len(runs)]()
    return (time.perf_counter() - start) / inner


def time_captured(
    runs: Sequence[Workload], device: torch.device, inner: int | None = None, busy_seconds: float = 0.0
) -> Timing:
    """The same where a CUDA graph launches them, so that the host's time does not count.

    Kernels choose their algorithms and take workspaces, and communicators connect, in the warm-up before the capture,
    on the stream of it. Ranks that communicate capture and replay equally often, given the same ``inner``.

    Args:
        busy_seconds: for which the device does the same before it is timed.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            for run in runs:
                run()
        torch.cuda.synchronize(device)
        # Rows of them, since a single one is mostly the host's time.
        inner = inner or max(len(runs), inner_runs(mean_seconds(runs, max(3, len(runs)), device), device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(inner):
                runs[i % len(runs)]()
        for _ in range(3):
            graph.replay()
        if busy_seconds:
            for _ in range(ceil(busy_seconds / mean_seconds([graph.replay], 1, device))):
                graph.replay()
        samples = [mean_seconds([graph.replay], 1, device) / inner for _ in range(REPEATS)]
        torch.cuda.synchronize(device)
    torch.cuda.current_stream(device).wait_stream(stream)
    return timing_from_samples(samples)


def time_kernels(runs: Sequence[Workload], device: torch.device, flops: float) -> Timing:
    """Time of a run in the way in which the fit subtracts what launching takes: captured on a GPU, plain on CPU.

    Args:
        flops: of one run.
    """
    if device.type != "cuda":
        return time_eager(runs, device)
    return time_captured(runs, device, busy_seconds=BUSY_SECONDS if flops >= BUSY_FLOPS else 0.0)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
