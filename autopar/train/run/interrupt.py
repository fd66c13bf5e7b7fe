"""Ctrl-C during a training run: the first ends it between two updates, the second ends it immediately."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autopar.train.rank_zero import is_rank_zero

NOTICE = b"\nInterrupted: the run ends after this update. Ctrl-C again ends it immediately.\n"


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, raised at a point where the model's state matches the trainer's position."""


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.requested = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        del number, frame
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if is_rank_zero():
            os.write(2, NOTICE)  # the signal may have interrupted a print


@contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Within ``with``, the first Ctrl-C is recorded instead of raised.

    Ctrl-C is left alone outside of the main thread, and if the caller has a SIGINT handler.
    """
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
