"""Seconds of one run of some work: medians over repeats, by the host's clock on CPU and by CUDA events on a GPU.

`time_kernels` is for the points of a cost model, from whose times the fit subtracts the launch overhead.
`time_sustained` is for compiled regions. It times a GPU that has computed for a while, as in training: at its power
limit a GPU is slower than in its first milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

Workload = Callable[[], object]
SAMPLE_SECONDS = {"cpu": 4e-3, "cuda": 2e-3}  # of one repeat, so that the clock's resolution does not count
SUSTAINED_SAMPLE_SECONDS = 0.03
REPEATS, LONG_RUN_REPEATS = 9, 5
LONG_RUN_SECONDS = 0.15  # a run that takes longer is repeated LONG_RUN_REPEATS times
MAX_INNER = 2000
MAX_CAPTURED = 20  # runs in one CUDA graph of `time_sustained`: more would only take memory
# A GPU that computes for longer than BUSY_SECONDS reaches its power limit and lowers its clock, as it does in training.
# Kernels of at least BUSY_FLOPS are timed after that.
BUSY_SECONDS, BUSY_FLOPS = 0.3, 1e10


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run, and the interquartile range of its repeats as a share of the median."""

    seconds: float
    spread: float


def timing_from_samples(samples: Sequence[float]) -> Timing:
    """Median and spread of the seconds of several repeats."""
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return Timing(float(middle), float((high - low) / middle))


def single_run_seconds(run: Workload, device: torch.device) -> float:
    """Seconds of one run, launch and synchronisation included: used to choose the number of runs in a repeat."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def inner_runs(seconds: float, device: torch.device) -> int:
    """Number of runs in one repeat, for runs of so many seconds."""
    return min(MAX_INNER, max(1, ceil(SAMPLE_SECONDS[device.type] / max(seconds, 1e-9))))


def time_eager(runs: Sequence[Workload], device: torch.device) -> Timing:
    """Time of one run, launched from Python.

    Args:
        runs: equal runs, each on its own data, called in turn.
    """
    runs[0]()
    if single_run_seconds(runs[0], device) > LONG_RUN_SECONDS:  # for so long a run it does not matter what caches hold
        return time_repeats(runs[:1], device, 1, LONG_RUN_REPEATS)
    for run in runs[1:]:
        run()
    return time_repeats(runs, device, inner_runs(min(single_run_seconds(runs[0], device) for _ in range(2)), device))


def time_repeats(runs: Sequence[Workload], device: torch.device, inner: int, repeats: int = REPEATS) -> Timing:
    """Median over ``repeats`` samples of ``inner`` runs each.

    The caller fixes ``inner`` because ranks that communicate must run equally often.
    """
    return timing_from_samples([mean_seconds(runs, inner, device) for _ in range(repeats)])


def mean_seconds(runs: Sequence[Workload], inner: int, device: torch.device) -> float:
    """Mean seconds of ``inner`` consecutive runs."""
    if device.type == "cuda":
        start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start_event.record()
        for i in range(inner):
            runs[i % len(runs)]()
        end_event.record()
        end_event.synchronize()
        return start_event.elapsed_time(end_event) / 1e3 / inner
    start = time.perf_counter()
    for i in range(inner):
        runs[i % len(runs)]()
    return (time.perf_counter() - start) / inner


def time_captured(
    runs: Sequence[Workload], device: torch.device, *, inner: int | None = None, busy_seconds: float = 0.0
) -> Timing:
    """Time of one run launched from a CUDA graph, so that the host's time does not count.

    Three warm-up runs on the capture stream let kernels choose algorithms and take workspaces, and let communicators
    connect.

    Args:
        inner: runs in the graph. Ranks that communicate must run equally often, so all are given the same number.
        busy_seconds: for how long the device replays the graph before it is timed.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            for run in runs:
                run()
        torch.cuda.synchronize(device)
        # Several runs, since the time of a single one is mostly the host's.
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
    """Time of a run in the execution mode whose launch overhead the fit subtracts: captured on a GPU, eager on CPU.

    Args:
        flops: of one run.
    """
    if device.type != "cuda":
        return time_eager(runs, device)
    return time_captured(runs, device, busy_seconds=BUSY_SECONDS if flops >= BUSY_FLOPS else 0.0)


def time_sustained(run: Workload, device: torch.device, captured: bool) -> Timing:
    """Time of one run, on a GPU after the same work has kept it busy for BUSY_SECONDS.

    Args:
        captured: launch the runs from a CUDA graph. The caller must have entered a stream other than the default one.
    """
    if device.type == "cpu":
        return time_eager([run], device)
    for _ in range(3):  # compiles, chooses algorithms, takes workspaces
        run()
    torch.cuda.synchronize(device)
    count = min(MAX_CAPTURED, inner_runs(mean_seconds([run], 3, device), device)) if captured else 1
    repeated = capture(run, count) if captured else run
    seconds = mean_seconds([repeated], 3, device)
    mean_seconds([repeated], ceil(BUSY_SECONDS / seconds), device)
    timing = time_repeats([repeated], device, max(1, ceil(SUSTAINED_SAMPLE_SECONDS / seconds)))
    return Timing(timing.seconds / count, timing.spread)


def capture(run: Workload, count: int) -> Workload:
    """A CUDA graph's replay that does ``count`` runs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(count):
            run()
    return graph.replay


def synchronize(device: torch.device) -> None:
    """Wait for the device to be idle; returns immediately on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
