"""Ctrl-C during a training run: the first asks it to end between two updates, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autopar.train.rank_zero import is_rank_zero

NOTICE = b"\nInterrupted: the run ends after this update. Ctrl-C again ends it at once.\n"


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, raised where the model and the trainer's position belong together."""


class Interrupt:
    """Whether Ctrl-C asked the run to end."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if is_rank_zero():
            os.write(2, NOTICE)  # print may be what the signal came in the middle of


@contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Within ``with``, the first Ctrl-C is noted; unless another thread or the caller's own handler would get it."""
    interrupt = Interrupt()
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
