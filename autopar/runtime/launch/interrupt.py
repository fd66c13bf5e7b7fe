"""Ctrl-C during calls that only read: the call ends first, so that the ranks stay in step and the model usable."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Deferral:
    """Handler of Ctrl-C that keeps the first one for the end of a call, and passes others on to ``handler``."""

    def __init__(self, call: str, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.call, self.handler = call, handler
        self.frames: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.frames.append(frame)
        if len(self.frames) > 1:
            self.handler(number, frame)
        elif self.handler is signal.default_int_handler:  # another handler says itself what happens
            # Not print: the signal may have interrupted one.
            os.write(2, f"\nautopar: interrupted once {self.call} has ended. Ctrl-C again ends the model.\n".encode())


@contextmanager
def interrupt_at_end(call: str) -> Iterator[None]:
    """Context in which the first Ctrl-C is handled at the end, and a second one immediately.

    Args:
        call: name of what runs inside, for the notice.

    Outside of the main thread, which alone handles signals, the context is empty. So it is inside of another one.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not callable(handler) or isinstance(handler, Deferral):
        yield
        return
    deferral = Deferral(call, handler)
    signal.signal(signal.SIGINT, deferral)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if deferral.frames:
        handler(signal.SIGINT, deferral.frames[0])
