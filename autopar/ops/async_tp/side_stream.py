"""The CUDA side stream on which collectives overlap with compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """Run the body on the device's side stream; the callable that this yields makes the current stream wait for it.

    On a CPU the body runs as it stands.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    if device not in STREAMS:
        # High priority: the kernels are small, and peers wait for their results.
        STREAMS[device] = torch.cuda.Stream(device, priority=-1)
    stream = STREAMS[device]
    # Also orders this stream after earlier users: its caching-allocator blocks may be reused.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield lambda: torch.cuda.current_stream(device).wait_stream(stream)
