"""Ctrl-C during calls that only read: the call ends first, so that the ranks stay in step and the model usable."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_at_end(call: str) -> Iterator[None]:
    """Context in which the first Ctrl-C is handled at the end, and a second one immediately.

    Args:
        call: name of what runs inside, for the notice.

    Outside of the main thread, which alone handles signals, the context is empty.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[FrameType | None] = []

    def defer(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) > 1:
            handler(number, frame)
        elif handler is signal.default_int_handler:  # another handler says itself what happens
            # Not print: the signal may have interrupted one.
            os.write(2, f"\nautopar: interrupted once {call} has ended. Ctrl-C again ends the model.\n".encode())

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if frames:
        handler(signal.SIGINT, frames[0])
