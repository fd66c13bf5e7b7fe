"""Time of a rank's work: the host's clock on CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Makes marks that cost next to nothing; how far apart they are is asked afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """This moment: on a GPU, that of reaching this point of the current stream."""
        if self.device.type == "cpu":
            return time.perf_counter()
        # In a graph that is being captured the event becomes a part of it, and is marked again by each replay.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def host_ns(self, mark: Any) -> int:
        """The host's clock (`time.perf_counter_ns`) at a mark; on a GPU, waits for the device.

        Error: none on CPU. On a GPU the time between the device reaching a second mark and the host noticing: some
        10 µs, always late.
        """
        if self.device.type == "cpu":
            return round(mark * 1e9)
        torch.cuda.synchronize(self.device)
        now = self.mark()
        now.synchronize()
        return time.perf_counter_ns() - round(self.seconds(mark, now) * 1e9)

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; on a GPU, waits until both are reached."""
        if self.device.type == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
