"""Agreement of a launcher's ranks on a name for their attempt, which no earlier attempt in the same store has had.

A launcher that starts failed ranks again keeps its store, and with it what earlier attempts wrote: their failures, and
the addresses of their process groups. TORCHELASTIC_RESTART_COUNT cannot tell attempts apart, because the nodes of
torchrun count differently: a node counts the failures of local processes only.

Keys, where a nonce is a number that nobody else draws:

| key | written by | value |
|---|---|---|
| hello/0 | rank 0 | nonce of rank 0, the name of the attempt |
| hello/i | rank i | nonce of rank i |
| answer/<nonce of rank i> | rank 0 | name of the attempt |
| <name>/heard/i | rank i | nonce of rank i |
| <name>/complete | rank 0, once all ranks have heard of it | |

Values of earlier attempts do no harm: nobody reads an answer to an earlier nonce, and only a rank of this attempt can
repeat its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

from autopar.errors import UsageError

if TYPE_CHECKING:  # reading a launcher's variables needs no torch
    import torch.distributed as dist

POLL_SECONDS = 0.05


def attempt_name(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """Name of this attempt, equal on all ranks; all of them make the call.

    Raises:
        TimeoutError: a rank did not make the call within ``seconds``.
        UsageError: another process makes the call as rank 0.
    """
    return chosen_name(store, world, seconds) if rank == 0 else received_name(store, rank, seconds)


def chosen_name(store: dist.Store, world: int, seconds: float) -> str:
    """Name that rank 0 draws, once all other ranks have it."""
    name, nonces = uuid4().hex, dict[int, str]()
    store.set("hello/0", name)
    for _ in polls(seconds):
        if read(store, "hello/0") != name:
            raise UsageError(
                "Another process has started as rank 0 while this one waited for other ranks. Give each job another "
                "MASTER_PORT."
            )
        for rank in range(1, world):
            nonce = read(store, f"hello/{rank}")
            if nonce is not None and nonce != nonces.get(rank):  # the earlier one was that of an earlier attempt
                store.set(f"answer/{nonce}", name)
                nonces[rank] = nonce
        if all(rank in nonces and read(store, f"{name}/heard/{rank}") == nonces[rank] for rank in range(1, world)):
            store.set(f"{name}/complete", "")
            return name
    missing = [rank for rank in range(1, world) if rank not in nonces or read(store, f"{name}/heard/{rank}") is None]
    raise TimeoutError(f"rank {', '.join(map(str, missing))} did not answer")


def received_name(store: dist.Store, rank: int, seconds: float) -> str:
    """Name that rank 0 has drawn, once all ranks have it."""
    nonce, names = uuid4().hex, list[str]()
    store.set(f"hello/{rank}", nonce)
    for _ in polls(seconds):
        name = read(store, f"answer/{nonce}")
        if name is not None and name not in names:
            store.set(f"{name}/heard/{rank}", nonce)
            names.append(name)
        # Rank 0 of an earlier attempt may have answered too, if it was still running.
        complete = next((name for name in names if store.check([f"{name}/complete"])), None)
        if complete is not None:
            return complete
    raise TimeoutError("rank 0 waits for other ranks" if names else "rank 0 did not answer")


def polls(seconds: float) -> Iterator[None]:
    """Turns of a loop that polls for some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(POLL_SECONDS)


def read(store: dist.Store, key: str) -> str | None:
    """Value of a key, None if nobody has written it."""
    return store.get(key).decode() if store.check([key]) else None
