"""Times of work that goes on for long: a GPU at its power limit is slower than in its first milliseconds."""

from __future__ import annotations

from math import ceil

import torch

from autopar.measure.machine.clock import BUSY_SECONDS, REPEATS, Run, Timing, inner_runs, sample, timed, timing_of

REPEAT_SECONDS = 0.03
MAX_CAPTURED = 20  # runs in one graph: more is only memory


def timed_steadily(run: Run, device: torch.device, captured: bool) -> Timing:
    """Median of repeats, on a GPU of work that has gone on for a while.

    Args:
        captured: have a CUDA graph launch it; the caller is in a stream of its own.
    """
    if device.type == "cpu":
        return timed([run], device)
    for _ in range(3):  # compiles, chooses algorithms, takes workspaces
        run()
    torch.cuda.synchronize(device)
    once = sample([run], 3, device)
    count = min(MAX_CAPTURED, inner_runs(once, device)) if captured else 1
    again = graph_of(run, count) if captured else run
    seconds = sample([again], 3, device)
    sample([again], ceil(BUSY_SECONDS / seconds), device)
    inner = max(1, ceil(REPEAT_SECONDS / seconds))
    found = timing_of([sample([again], inner, device) for _ in range(REPEATS)])
    return Timing(found.seconds / count, found.spread)


def graph_of(run: Run, count: int) -> Run:
    """Replays that many runs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(count):
            run()
    return graph.replay
