"""Failures of a launcher's ranks, published to the ranks of all nodes.

When a process fails, torchrun ends the processes of the same node; srun ends none by default. NCCL waits for a lost
peer until the run's timeout. So a rank that fails writes the reason into the store where all ranks met.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch.distributed as dist

from autopar.errors import SEE_DOCTOR
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.launch.attempt import read
from autopar.runtime.spec import rank_text

if TYPE_CHECKING:
    from autopar.runtime.rank import Rank

UNCAUGHT = "uncaught"  # key of a process that ended with an exception, which ends the ranks of all models
POLL_SECONDS = 0.5
CONNECT_SECONDS = 2.0  # to connect to the store again after a lost connection
GRACE_SECONDS = 2.0  # to receive the cause, and for a rank to notice by itself that its peer is gone
# A longer time in three cases: the rank is in no call but its GPU waits for other ranks; the rank itself has failed
# and has to close; or the process that serves the store has ended, which it may do at the end of a run.
PATIENT_SECONDS = 10.0
GONE = "the process of the ranks' store is gone (rank 0 or the launcher)"
# At the end of a process whose rank has failed: time for its GPU to finish, then time for Python to end.
GPU_SECONDS, LEAVE_SECONDS = 2.0, 5.0


class StoreConnection:
    """A second connection to the ranks' store, made again once it is lost.

    While a thread waits for a key on the first one, other threads cannot use that.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store.clone()
        self.store.set_timeout(timedelta(seconds=CONNECT_SECONDS))

    def ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Answer of the store; on a new connection if the connection was lost.

        Raises:
            RuntimeError: the process that serves the store is gone.
        """
        try:
            return question(self.store)
        except RuntimeError:
            self.store = self.store.clone()
            return question(self.store)


class FailureWatcher:
    """Publishes this rank's failure and watches for failures of other ranks.

    A thread polls the store. It ends the process if the process waits for a rank that has failed. No exception can
    reach a thread that waits for its GPU, so the whole process ends, after it has printed the cause.
    """

    def __init__(self, store: dist.Store, key: str, name: str, waits: Callable[[], bool]) -> None:
        """Start the thread.

        Args:
            key: key of the failures of this model's ranks. A failure that the caller of another model has caught does
                not end this one.
            name: this rank in messages, such as ``rank 1 (stage 1)``.
            waits: whether this rank's GPU may wait for other ranks while no call runs.
        """
        self.connection = StoreConnection(store)
        self.key, self.name, self.waits = key, name, waits
        self.calls = 0  # number of calls begun plus number of calls ended: odd during a call
        self.failed = False
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        # A thread that returns from the store into an interpreter that has ended aborts the process.
        atexit.register(self.close)

    @contextmanager
    def report_failures(self, command: str) -> Iterator[None]:
        """Surrounds a command that waits for other ranks.

        An error of this rank is published to the other ranks. A lost connection gets the cause from them as a note.
        """
        self.calls += 1
        try:
            yield
        except (TransportError, dist.DistError) as error:
            cause = self.poll_failure(GRACE_SECONDS)
            if cause is not None:
                error.add_note(f"autopar: the cause is another rank's: {cause}")
            else:
                error.add_note(f"autopar: no rank has said why. {SEE_DOCTOR}")
            raise
        except Exception as error:
            self.failed = True
            with suppress(RuntimeError):  # the process that served the store is gone
                text = f"{self.name} failed during {command}: {type(error).__name__}: {error}"
                self.connection.ask(lambda store: store.compare_set(self.key, "", text))
            raise
        finally:
            self.calls += 1

    def poll_failure(self, seconds: float) -> str | None:
        """Reason why a rank failed; None if no rank has published one within ``seconds``."""
        deadline = time.monotonic() + seconds
        while (cause := self.published()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self.closed.wait(min(POLL_SECONDS, remaining)):
                break
        return cause

    def published(self) -> str | None:
        """Reason that a rank has published; `GONE` if the store does not answer."""
        try:
            return self.connection.ask(lambda store: read(store, self.key) or read(store, UNCAUGHT))
        except RuntimeError:
            return GONE

    def listen(self) -> None:
        """End the process if another rank has failed and therefore a call or the GPU's work cannot end."""
        cause = None
        while not self.closed.is_set():
            if cause is None:
                cause = self.poll_failure(POLL_SECONDS)
                continue
            call = self.calls
            inside = call % 2 == 1
            patient = self.failed or cause == GONE or not inside
            ended = self.closed.wait(PATIENT_SECONDS if patient else GRACE_SECONDS)
            if ended or call != self.calls or not (inside or self.waits()):
                continue
            if cause == GONE and (cause := self.published()) != GONE:
                continue
            print(f"autopar: {self.name} was ended, because {cause}", file=sys.stderr, flush=True)
            os._exit(1)

    def close(self) -> None:
        """Stop the thread, even if the store does not answer."""
        self.closed.set()
        self.thread.join(GRACE_SECONDS)
        atexit.unregister(self.close)


def publish_uncaught(store: dist.Store, rank: int) -> None:
    """Publish the exception that ends this process, if one will, to the ranks of all models."""
    atexit.unregister(at_exit)
    atexit.register(at_exit, store, rank)


def at_exit(store: dist.Store, rank: int) -> None:
    """Publish the exception that ended the main module. Python keeps it in ``sys`` before it runs this."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        with suppress(RuntimeError):  # the process that served the store is gone
            store.compare_set(UNCAUGHT, "", f"rank {rank} ended with {type(error).__name__}: {error}")


def exit_after_failure(failed: ref[Rank]) -> None:
    """Let the process of a failed rank end, within a few seconds.

    The rank's GPU may wait for a rank that is gone. Python frees memory that the GPU uses, so Python waits for the GPU.
    """
    rank = failed()
    deadline = time.monotonic() + GPU_SECONDS
    while rank is not None and rank.is_busy():
        if time.monotonic() >= deadline:
            name = rank_text(rank.mesh, rank.spec.rank, rank.spec.placement)
            print(f"autopar: {name} leaves a GPU that waits for another rank", file=sys.stderr, flush=True)
            # faulthandler ends the process from a thread that needs no interpreter: Python's threads have none by then.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=nowhere)
            return
        time.sleep(0.05)
