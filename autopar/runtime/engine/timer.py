"""Timer of a rank's work: the host's clock on CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Makes cheap time marks; the seconds between two marks are computed later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """A mark of this moment; on a GPU, of the moment when the current stream reaches this point."""
        if self.device.type == "cpu":
            return time.perf_counter()
        # Under capture the event becomes a part of the CUDA graph, and each replay records it again.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def host_ns(self, mark: Any) -> int:
        """Host's clock (`time.perf_counter_ns`) at a mark; on a GPU, waits for the device.

        Error: none on CPU. On a GPU some 10 µs late: the time from the device's second mark until the host notices it.
        """
        if self.device.type == "cpu":
            return round(mark * 1e9)
        torch.cuda.synchronize(self.device)
        now = self.mark()
        now.synchronize()
        return time.perf_counter_ns() - round(self.seconds(mark, now) * 1e9)

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks; on a GPU, waits until both are reached."""
        if self.device.type == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
