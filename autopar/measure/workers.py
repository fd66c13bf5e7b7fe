"""Processes that measure: started as torchrun starts its own, and ended.

They are fresh interpreters, not forks of the fork server: they run for longer than an import, in other environments
than workers, and no time should depend on memory that is shared with another process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

END_SECONDS = 5.0
HOST = "127.0.0.1"
# Of a launcher around the caller, or of Slurm's: what the processes' own launcher sets differs.
FOREIGN = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")


def start(module: str, folder: Path, rank: int, world: int, port: int, threads: int | None) -> subprocess.Popen:
    """One rank, ``python -m module folder``, its output in a file."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    environment |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": HOST, "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,  # closes with this process, however that ends
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def end(processes: Sequence[subprocess.Popen]) -> None:
    """End those that still run."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def last_line(log: Path) -> str:
    """The last line that a process printed."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "nothing"


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]
