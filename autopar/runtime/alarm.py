"""How the ranks of a launcher learn why another one failed, on whichever node it ran.

torchrun ends the processes of its own node when one fails, srun none unless told to, and NCCL waits for a lost peer
until the run's timeout. So a rank that fails writes the reason into the store where all have met.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from autopar.runtime.transport import TransportError

KEY = "failed"
POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # for the cause to be heard, and for a rank to notice by itself that its peer is gone


class Alarm:
    """This rank's ear and voice. A thread listens; it ends the process if that waits for a rank that has failed."""

    def __init__(self, store: dist.Store, name: str) -> None:
        """``name`` is this rank's, as in ``rank 1 (stage 1)``."""
        self.store, self.name = store, name
        self.calls = 0  # begun and ended ones: odd during a call
        self.closed = threading.Event()
        threading.Thread(target=self.listen, daemon=True).start()

    @contextmanager
    def guarding(self, command: str) -> Iterator[None]:
        """A command during which other ranks are waited for: an error in it is told to them, or explained by them."""
        self.calls += 1
        try:
            yield
        except (TransportError, dist.DistError) as error:
            cause = self.heard(GRACE_SECONDS)
            if cause is not None:
                error.add_note(f"autopar: the cause is another rank's: {cause}")
            raise
        except Exception as error:
            with suppress(RuntimeError):  # the store is gone with the rank or the launcher that served it
                self.store.compare_set(KEY, "", f"{self.name} failed during {command}: {type(error).__name__}: {error}")
            raise
        finally:
            self.calls += 1

    def heard(self, seconds: float) -> str | None:
        """Why another rank failed, if that is heard in time."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):  # as above
            while True:
                if self.store.check([KEY]):
                    return self.store.get(KEY).decode()
                if self.closed.wait(max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))):
                    return None
                if time.monotonic() >= deadline:
                    return None
        return None

    def listen(self) -> None:
        """End the process when another rank has failed and a call goes on that cannot end any more."""
        cause = None
        while cause is None and not self.closed.is_set():
            cause = self.heard(POLL_SECONDS)
        while not self.closed.is_set():
            call = self.calls
            if not self.closed.wait(GRACE_SECONDS) and call % 2 and call == self.calls:
                print(f"autopar: {self.name} was ended, because {cause}", file=sys.stderr, flush=True)
                os._exit(1)

    def close(self) -> None:
        """Stop listening."""
        self.closed.set()
