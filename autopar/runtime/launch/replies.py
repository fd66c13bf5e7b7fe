"""Replies of worker processes to one command, and the wait for them."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from autopar.errors import caller_level
from autopar.runtime.launch.ipc import WorkerChannel
from autopar.runtime.launch.worker import WHERE, Failure, Position

GRACE_SECONDS = 1.0  # after the first failure, to receive the failure of the rank that caused it
ANSWER_SECONDS = 5.0  # for a rank to say where it is; its listener thread answers


class Replies:
    """Replies to one command so far.

    Every wait for replies has a limit. The first reply may take ``first_seconds``. If none has come by then, the ranks
    are asked where they are: while one says that it computes, the wait begins again, and one warning says so. If all of
    them wait for other ranks or for a GPU, or do not answer, the command has failed. From the first reply on, each
    further one may take ``next_seconds``: no rank waits longer for a peer.

    Args:
        name: the command's name in messages.
        channels: channels to the ranks that got the command, by rank.

    Attributes:
        results: results by rank.
        failures: failures by rank; None stands for a rank that died.
    """

    def __init__(
        self, name: str, channels: Mapping[int, WorkerChannel], first_seconds: float, next_seconds: float
    ) -> None:
        self.name, self.channels = name, channels
        self.first_seconds, self.next_seconds = first_seconds, next_seconds
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure | None] = {}
        self.positions: dict[int, Position] = {}
        self.warned = False

    @property
    def silent(self) -> set[int]:
        """Ranks that have not replied."""
        return self.channels.keys() - self.results.keys() - self.failures.keys()

    def collect(self) -> bool:
        """Wait for all replies; whether all ranks have succeeded. If not, ``failures`` tells all that is known."""
        while self.silent and not self.failures:
            seconds = self.next_seconds if self.results else self.first_seconds
            if not self.receive(seconds) and (self.results or not self.is_computing()):
                break
        if self.silent:
            self.add_reasons()
        return not self.failures

    def receive(self, seconds: float) -> bool:
        """Take the messages that arrive first; false if none arrives in time."""
        waiting = {self.channels[rank].connection: rank for rank in self.silent}
        arrived = [waiting[connection] for connection in wait(list(waiting), seconds)]  # type: ignore[index]
        for rank in arrived:
            self.take(rank)
        return bool(arrived)

    def take(self, rank: int) -> None:
        """Receive a message of a rank: its reply, or its answer to `WHERE`."""
        try:
            message = self.channels[rank].receive()
        except (EOFError, OSError):
            self.failures[rank] = None
            return
        try:
            ok, result = self.channels[rank].decode(message)
        except Exception as error:
            details = "".join(traceback.format_exception(error))
            ok, result = False, Failure(rank, "", f"its reply cannot be read: {error!r}", details, False)
        if isinstance(result, Position):
            self.positions[rank] = result
        elif ok:
            self.results[rank] = result
        else:
            self.failures[rank] = result

    def ask(self, seconds: float) -> None:
        """Ask the silent ranks where they are, and take all messages until they have answered or time is over."""
        self.positions.clear()
        for rank in self.silent:
            with suppress(OSError):  # the closed connection shows that the worker died
                self.channels[rank].send(self.channels[rank].encode(WHERE))
        deadline = time.monotonic() + seconds
        while self.silent - self.positions.keys() and (left := deadline - time.monotonic()) > 0:
            self.receive(left)

    def is_computing(self) -> bool:
        """Whether to wait on after ``first_seconds`` without a reply: a rank computes, or has just replied."""
        self.ask(ANSWER_SECONDS)
        computing = [position for position in self.positions.values() if not position.waits]
        if computing and self.silent == self.channels.keys() and not self.warned:
            self.warned = True
            warnings.warn(
                f"No rank has replied to {self.name} for {self.first_seconds:.1f} s: "
                + "; ".join(f"rank {position.rank} is still {position.text}" for position in computing),
                stacklevel=caller_level(),
            )
        return bool(computing) or self.silent < self.channels.keys()

    def add_reasons(self) -> None:
        """Add failures of other ranks: the first rank to reply is not always the cause.

        If every failed rank only noticed that a peer is silent, the positions of the silent ranks are failures too.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while self.failures and self.silent and (left := deadline - time.monotonic()) > 0:
            self.receive(left)
        if all(f is not None and f.secondary for f in self.failures.values()):
            self.ask(GRACE_SECONDS)
            self.failures |= {rank: self.positions[rank].failure for rank in self.silent & self.positions.keys()}
            for rank in self.silent:
                self.failures[rank] = Failure(rank, "", "no reply, and it does not say where it is", "", False)
