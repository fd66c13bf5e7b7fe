"""Ctrl-C and SIGTERM during a training run: the first ends it between two updates, the second ends it immediately."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

from autopar.train.rank_zero import is_rank_zero

NOTICE = b"\n%s: the run ends after this update. %s again ends it immediately.\n"
TERMINATED = 128 + signal.SIGTERM  # the exit code that shells report for SIGTERM
# A job manager sends SIGTERM to all processes of a job and torchrun passes its own on: a rank then gets two at a time.
REPEAT_SECONDS = 2.0

Handler = Callable[[int, FrameType | None], Any] | int


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, raised at a point where the model's state matches the trainer's position."""


class TrainingTerminated(SystemExit):
    """SIGTERM, raised at a point where the model's state matches the trainer's position."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class Interrupt:
    """Whether Ctrl-C was pressed or SIGTERM arrived; ``number`` is the signal's."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.since = 0.0  # time of the first signal
        self.owner = os.getpid()  # its forks have the handler too, and must end when they are terminated

    @property
    def requested(self) -> bool:
        return self.number is not None

    @property
    def terminated(self) -> bool:
        return self.number == signal.SIGTERM

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM."""
        repeated = self.number is not None and (
            number == signal.SIGINT or time.monotonic() - self.since >= REPEAT_SECONDS
        )
        if repeated or os.getpid() != self.owner:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            exit_terminated(number, frame)
        if self.number is None:
            self.number, self.since = number, time.monotonic()
            if is_rank_zero():
                words = (b"Interrupted", b"Ctrl-C") if number == signal.SIGINT else (b"Terminated", b"SIGTERM")
                os.write(2, NOTICE % words)  # the signal may have interrupted a print


def exit_terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM where there is nothing to save: exit, so that files and processes are cleaned up.

    Later ones are ignored, so that they do not interrupt that.
    """
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


@contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Within ``with``, the first Ctrl-C or SIGTERM is recorded instead of taking effect.

    Signals are left alone outside of the main thread, and each signal that the caller handles.
    """
    interrupt = Interrupt()
    with ExitStack() as handlers:
        handlers.enter_context(handled(signal.SIGINT, interrupt.ask, signal.default_int_handler))
        handlers.enter_context(handled(signal.SIGTERM, interrupt.ask, signal.SIG_DFL, exit_terminated))
        yield interrupt


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Within ``with``, SIGTERM raises SystemExit instead of killing the process, unless the caller handles it."""
    with handled(signal.SIGTERM, exit_terminated, signal.SIG_DFL):
        yield


@contextmanager
def handled(number: signal.Signals, handler: Handler, *replaced: Handler) -> Iterator[None]:
    """Within ``with``, a signal has this handler, if it has one of ``replaced`` before and this is the main thread."""
    before = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or before not in replaced:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
