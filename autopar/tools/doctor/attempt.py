"""A probe under a time limit: what it finds, or the finding that it failed. A probe neither hangs nor ends the page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from autopar.errors import SEE_DOCTOR
from autopar.tools.doctor.finding import Finding, Probe, Subject

T = TypeVar("T")
MAX_REASON = 400  # letters of an error on the page


class TookTooLongError(Exception):
    """A probe was given up after its time limit; the message says after how many seconds."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """Result of ``work``, which runs in a thread: one that hangs in a system call is left behind.

    Raises:
        TookTooLongError: it has not ended after so many seconds.
        Exception: that of ``work``.
    """
    answers: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except Empty:
        raise TookTooLongError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there is no error


def findings_of(probe: Probe, subject: Subject) -> tuple[Finding, ...]:
    """Findings of a probe. One that raises or takes too long gives a broken one with the cause."""
    try:
        return within(probe.limit_seconds, lambda: tuple(probe.run(subject)))
    except Exception as error:  # whatever it is: to report it is the result
        return (Finding(probe.section, probe.name, "broken", reason(error), probe.remedy),)


def reason(error: Exception) -> str:
    """An error in one line; its class is named unless the message is autopar's."""
    message = " ".join(str(error).removesuffix(f" {SEE_DOCTOR}").split()).removesuffix(".")
    if not type(error).__module__.startswith("autopar."):
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return message if len(message) <= MAX_REASON else message[: MAX_REASON - 1] + "…"
