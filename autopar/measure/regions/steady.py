"""Times of work that goes on for long: a GPU at its power limit is slower than in its first milliseconds."""

from __future__ import annotations

from math import ceil

import torch

from autopar.measure.machine.clock import (
    BUSY_SECONDS,
    REPEATS,
    Timing,
    Workload,
    inner_runs,
    mean_seconds,
    time_eager,
    timing_from_samples,
)

REPEAT_SECONDS = 0.03
MAX_CAPTURED = 20  # runs in one graph: more is only memory


def time_sustained(run: Workload, device: torch.device, captured: bool) -> Timing:
    """Median of repeats, on a GPU of work that has gone on for a while.

    Args:
        captured: have a CUDA graph launch it; the caller is in a stream of its own.
    """
    if device.type == "cpu":
        return time_eager([run], device)
    for _ in range(3):  # compiles, chooses algorithms, takes workspaces
        run()
    torch.cuda.synchronize(device)
    once = mean_seconds([run], 3, device)
    count = min(MAX_CAPTURED, inner_runs(once, device)) if captured else 1
    again = capture(run, count) if captured else run
    seconds = mean_seconds([again], 3, device)
    mean_seconds([again], ceil(BUSY_SECONDS / seconds), device)
    inner = max(1, ceil(REPEAT_SECONDS / seconds))
    found = timing_from_samples([mean_seconds([again], inner, device) for _ in range(REPEATS)])
    return Timing(found.seconds / count, found.spread)


def capture(run: Workload, count: int) -> Workload:
    """Replays that many runs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(count):
            run()
    return graph.replay
