"""What runs beside the current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """On a GPU what is inside runs beside what follows, until the callable that this gives is called."""
    if device.type != "cuda":
        yield lambda: None
        return
    if device not in STREAMS:
        # First in line for multiprocessors: little work, and others wait for it.
        STREAMS[device] = torch.cuda.Stream(device, priority=-1)
    stream = STREAMS[device]
    # Also before what the last user's memory is used for anew, which is this stream's.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield lambda: torch.cuda.current_stream(device).wait_stream(stream)
