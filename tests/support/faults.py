"""Worker processes: their ids, and waiting until they have ended."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable

import psutil
from torch import nn

WORKER = "autopar:rank"  # prefix of a worker's process name
FAULT_SECONDS = 10.0  # longest time in which a fault must be reported and cleaned up


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.1)
    )  # fmt: skip


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers(caller: int | None = None) -> dict[int, int]:
    """Process id of each worker of a caller (by default this process), by rank."""
    processes = list(psutil.process_iter(["pid", "ppid", "name"]))
    servers = {p.info["pid"] for p in processes if p.info["ppid"] == (caller or os.getpid())}
    names = {p.info["pid"]: p.info["name"] for p in processes if p.info["ppid"] in servers}
    return {int(name.removeprefix(WORKER)): pid for pid, name in names.items() if name.startswith(WORKER)}


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def free_port() -> int:
    """Free port outside the ephemeral range, so that the system gives it to no other process before it is bound."""
    while True:
        with socket.socket() as chosen, contextlib.suppress(OSError):
            chosen.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return chosen.getsockname()[1]
