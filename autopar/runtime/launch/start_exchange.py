"""Reports of a launcher's ranks to rank 0, and its answers, before there is a process group.

Rank 0 may plan for minutes while the others wait. An error of any rank is raised on all, so none waits in vain.

Keys, below the number of the start and of the question:

| key | written by | value |
|---|---|---|
| report/i | rank i | its report, or the error that it raises |
| answer | rank 0 | its answer to all reports, or the error that it raises |
| left/i | rank i | nothing, after an error: rank 0, whose process may serve the store, can raise it too |
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from autopar import errors
from autopar.errors import SEE_DOCTOR, AutoparError, WorkerError
from autopar.runtime.launch.attempt import read
from autopar.runtime.launch.environment import Launched, launcher_store
from autopar.runtime.launch.failure_watch import (
    GONE,
    GRACE_SECONDS,
    PATIENT_SECONDS,
    UNCAUGHT,
    StoreConnection,
    publish_uncaught,
)

REPORT_SECONDS = 600.0  # for all ranks to trace their models, once one rank has
ANSWER_SECONDS = 3600.0  # for rank 0 to plan, which may measure
LEAVE_SECONDS = 120.0  # for the other ranks to hear of rank 0's error, while they trace
MAX_POLL_SECONDS = 0.5
STARTS = count()  # numbers of the starts of this process, equal on all ranks, which separate their keys
ERRORS = {n: e for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, AutoparError)}


@dataclass(frozen=True)
class Message:
    """A report or an answer: a text, or an error's message with the name of its class in `autopar.errors`."""

    text: str = ""
    error: str | None = None

    @staticmethod
    def of(error: Exception, rank: int) -> Message:
        """An error as other ranks raise it: rank 0's error as it is, another rank's error with the rank's number.

        Its class is the nearest one of `autopar.errors`; a `WorkerError` stands for an error of another kind.
        """
        name = next((kind.__name__ for kind in type(error).__mro__ if kind in ERRORS.values()), None)
        if name is None:
            return Message(f"Rank {rank} failed before training: {type(error).__name__}: {error}", WorkerError.__name__)
        return Message(str(error) if rank == 0 else f"Rank {rank}: {error}", name)

    def checked(self) -> str:
        """The text. Raises the error if there is one."""
        if self.error is not None:
            raise ERRORS[self.error](self.text)
        return self.text


class StartExchange:
    """Messages of one `autopar.parallelize` on all ranks of a launcher, until their process groups take over."""

    def __init__(self, launch: Launched) -> None:
        """Meet the other ranks.

        Raises:
            UsageError, WorkerError: as `launcher_store`.
        """
        self.rank, self.others = launch.rank, range(1, launch.world)
        store = launcher_store(launch)
        publish_uncaught(store, launch.rank)
        self.connection = StoreConnection(store)
        self.start, self.question = next(STARTS), 0

    def decide(self, report: str, decision: Callable[[list[str]], str]) -> str:
        """Rank 0's answer to the reports of all ranks. All ranks make the call, none within `shared_errors`.

        Args:
            report: of this rank.
            decision: called on rank 0 with the reports by rank; returns the answer.

        Raises:
            Exception: of the decision; on other ranks a `WorkerError` if it is no `AutoparError`.
            AutoparError: another rank's, from `shared_errors`.
            WorkerError: a rank has ended or does not answer.
        """
        if self.rank == 0:
            with self.shared_errors():
                answer = decision([report, *self.reports()])
            self.write("answer", Message(answer))
        else:
            self.write(f"report/{self.rank}", Message(report))
            answer = self.answer()
        self.question += 1
        return answer

    def confirm(self) -> None:
        """Wait until all ranks have left `shared_errors` without an error. Raises as `decide`."""
        self.decide("", lambda reports: "")

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Context of a rank's work before `decide`. An error of this rank makes `decide` raise on the other ranks."""
        try:
            yield
        except Exception as error:
            message = Message.of(error, self.rank)
            with suppress(WorkerError):  # the process that served the store is gone
                if self.rank == 0:
                    self.write("answer", message)
                    self.wait({rank: f"left/{rank}" for rank in self.others}, LEAVE_SECONDS, PATIENT_SECONDS)
                else:
                    self.write(f"report/{self.rank}", message)
                    self.write(f"left/{self.rank}", Message())
            raise

    def reports(self) -> list[str]:
        """Reports of the other ranks, by rank. Raises the first error among them, also if a report is missing."""
        keys = {rank: f"report/{rank}" for rank in self.others}
        reason = self.wait(keys, REPORT_SECONDS)
        texts = [message.checked() for key in keys.values() if (message := self.read(key)) is not None]
        if reason is not None:
            raise WorkerError(f"The ranks cannot start: {reason}")
        return texts

    def answer(self) -> str:
        """Rank 0's answer. Raises the error that it is."""
        # After another rank's failure, the time in which rank 0 answers with that rank's error.
        reason = self.wait({0: "answer"}, ANSWER_SECONDS, GRACE_SECONDS)
        message = self.read("answer")
        if message is None:
            raise WorkerError(f"Rank {self.rank} cannot start: {reason}")
        try:
            return message.checked()
        except AutoparError:
            self.write(f"left/{self.rank}", Message())
            raise

    def wait(self, keys: Mapping[int, str], seconds: float, grace_seconds: float = 0.0) -> str | None:
        """Wait until other ranks have written all keys; returns the reason if they do not.

        Args:
            keys: of each rank that is waited for.
            grace_seconds: wait after another rank's process has ended with an exception.
        """
        paths, start, cause = [self.path(key) for key in keys.values()], time.monotonic(), None
        while not self.ask(lambda store: store.check(paths)):
            waited = time.monotonic() - start
            if cause is None and (cause := self.ask(lambda store: read(store, UNCAUGHT))) is not None:
                seconds = min(seconds, waited + grace_seconds)
            if waited >= seconds:
                silent = ", ".join(str(rank) for rank, key in keys.items() if self.read(key) is None)
                late = (
                    f"rank {silent} did not answer within {seconds:.0f} s. Pass plan= if planning is slow. {SEE_DOCTOR}"
                )
                return cause or late
            time.sleep(min(MAX_POLL_SECONDS, 0.01 + waited / 10))
        return None

    def path(self, key: str) -> str:
        """A key of the current question in the store."""
        return f"start/{self.start}/{self.question}/{key}"

    def write(self, key: str, message: Message) -> None:
        """Write a key. Raises as `ask`."""
        self.ask(lambda store: store.set(self.path(key), json.dumps(asdict(message))))

    def read(self, key: str) -> Message | None:
        """Message of a key; None if nobody has written it. Raises as `ask`."""
        text = self.ask(lambda store: read(store, self.path(key)))
        return None if text is None else Message(**json.loads(text))

    def ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Answer of the ranks' store.

        Raises:
            WorkerError: the process that serves it is gone.
        """
        try:
            return self.connection.ask(question)
        except RuntimeError as error:
            raise WorkerError(f"Rank {self.rank} cannot start: {GONE}. {SEE_DOCTOR}") from error
