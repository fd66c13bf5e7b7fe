"""How the ranks of a launcher learn why another one failed, on whichever node it ran.

torchrun ends the processes of its own node when one fails, srun none unless told to, and NCCL waits for a lost peer
until the run's timeout. So a rank that fails writes the reason into the store where all have met.
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
from typing import TYPE_CHECKING
from weakref import ref

import torch.distributed as dist

from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.spec import rank_text

if TYPE_CHECKING:
    from autopar.runtime.rank import Rank

KEY = "failed"
POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # for the cause to be heard, and for a rank to notice by itself that its peer is gone
# For a rank to come back that is in no call, but whose GPU waits; to close after a failure of its own; or to end when
# the process that serves the store has ended, as it may do when all is done.
PATIENT_SECONDS = 10.0
GONE = "the process is gone where the ranks met (rank 0 or the launcher)"
# At the end of a process whose rank has failed: what its GPU has to finish, and then Python.
GPU_SECONDS, LEAVE_SECONDS = 2.0, 5.0


class FailureWatcher:
    """This rank's ear and voice. A thread listens; it ends the process if that waits for a rank that has failed.

    A thread that waits for its GPU takes no exception: the process is ended as a whole, and says why.
    """

    def __init__(self, store: dist.Store, name: str, waits: Callable[[], bool]) -> None:
        """Start listening.

        Args:
            name: this rank's, as in ``rank 1 (stage 1)``.
            waits: whether its GPU may wait for other ranks although no call is going on.
        """
        # A connection of its own: while a thread waits for a key, others wait for that thread.
        self.store, self.name, self.waits = store.clone(), name, waits
        self.calls = 0  # begun and ended ones: odd during a call
        self.failed = False
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        # A thread that returns from the store into an interpreter that has ended aborts the process.
        atexit.register(self.close)

    @contextmanager
    def report_failures(self, command: str) -> Iterator[None]:
        """A command during which other ranks are waited for: an error in it is told to them, or explained by them."""
        self.calls += 1
        try:
            yield
        except (TransportError, dist.DistError) as error:
            cause = self.poll_failure(GRACE_SECONDS)
            if cause is not None:
                error.add_note(f"autopar: the cause is another rank's: {cause}")
            raise
        except Exception as error:
            self.failed = True
            with suppress(RuntimeError):  # the store is gone with the rank or the launcher that served it
                self.store.compare_set(KEY, "", f"{self.name} failed during {command}: {type(error).__name__}: {error}")
            raise
        finally:
            self.calls += 1

    def poll_failure(self, seconds: float) -> str | None:
        """Why a rank failed, if that is heard in time."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                if self.store.check([KEY]):
                    return self.store.get(KEY).decode()
                if self.closed.wait(max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))):
                    return None
                if time.monotonic() >= deadline:
                    return None
        except RuntimeError:
            return GONE

    def listen(self) -> None:
        """End the process when another rank has failed and a call, or work of its GPU, cannot end any more."""
        cause = None
        while cause is None and not self.closed.is_set():
            cause = self.poll_failure(POLL_SECONDS)
        while not self.closed.is_set():
            call = self.calls
            inside = call % 2 == 1
            patient = self.failed or cause == GONE or not inside
            ended = self.closed.wait(PATIENT_SECONDS if patient else GRACE_SECONDS)
            if not ended and call == self.calls and (inside or self.waits()):
                print(f"autopar: {self.name} was ended, because {cause}", file=sys.stderr, flush=True)
                os._exit(1)

    def close(self) -> None:
        """Stop listening, also to a store that does not answer."""
        self.closed.set()
        self.thread.join(GRACE_SECONDS)
        atexit.unregister(self.close)


def exit_after_failure(failed: ref[Rank]) -> None:
    """The process of a failed rank ends. Its GPU may wait for a rank that is gone, and Python, which gives back memory
    that the GPU uses, for the GPU: then the process is ended all the same, in a few seconds.
    """
    rank = failed()
    deadline = time.monotonic() + GPU_SECONDS
    while rank is not None and rank.is_busy():
        if time.monotonic() >= deadline:
            own = rank_text(rank.mesh, rank.spec.rank)
            print(f"autopar: {own} leaves a GPU that waits for another rank", file=sys.stderr, flush=True)
            # Ends the process from a thread that needs no interpreter, as Python's threads have none by then.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=nowhere)
            return
        time.sleep(0.05)
