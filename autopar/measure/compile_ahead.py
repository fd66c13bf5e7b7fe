"""Compilation of a rank's regions by several processes, before the rank needs them.

torch.compile works on one region at a time and on one core for most of it. Workers compile the regions into torch's
caches on disk; the rank then finds them there. Ranks of one machine that have equal regions leave each to the first
worker that takes its lock.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.codegen.compile import RegionSource
from autopar.errors import UsageError
from autopar.measure.workers import Emit, WorkerLimits, run_workers
from autopar.runtime.launch.torch_settings import TorchSettings

WORKERS = "AUTOPAR_COMPILE_WORKERS"  # environment variable: processes of a rank; none by default
LIMIT_SECONDS = 600.0  # without a region compiled; the rank then compiles what is left


@dataclass(frozen=True)
class Work:
    """Regions for the workers of a rank to compile, and the settings to compile them under.

    Args:
        compilers: processes in which torch.compile makes kernels for one worker.
        threads: of the rank, for which code for a CPU is made.
        settings: of the rank; torch's caches are kept by them.
    """

    regions: Sequence[RegionSource]
    compilers: int
    threads: int
    settings: TorchSettings


def compile_ahead(regions: Sequence[RegionSource]) -> None:
    """Compile regions into torch's caches in as many processes as AUTOPAR_COMPILE_WORKERS says; none does nothing.

    A region that a worker cannot compile is left to the rank, whose own compilation says why.

    Raises:
        UsageError: the variable is no number of processes.
    """
    workers = min(num_workers(), len(regions))
    if workers < 2:
        return
    compilers = max(1, (os.cpu_count() or 1) // workers)
    order = tuple(sorted(regions, key=lambda region: -len(region.module.code)))
    work = Work(order, compilers, torch.get_num_threads(), TorchSettings.current())
    run_workers(f"{__name__}:run", work, workers, None, WorkerLimits(LIMIT_SECONDS), lambda *_: True, name="compile")


def num_workers() -> int:
    """Processes that a rank compiles with.

    Raises:
        UsageError: the variable is no such number.
    """
    text = os.environ.get(WORKERS, "0")
    if not text.isdecimal():
        raise UsageError(f"{WORKERS}={text!r} must be a number of processes, 0 for none.")
    return int(text)


def run(work: Work, emit: Emit) -> None:
    """Compile this worker's share of the regions; emits None or an error's text for each."""
    import torch._inductor.config as inductor_config  # not public, as all of torch.compile's settings

    inductor_config.compile_threads = work.compilers
    torch.set_num_threads(work.threads)
    with work.settings.active():
        for region in work.regions[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
            if region.device.type == "cuda":
                torch.cuda.set_device(region.device)
            with locked(region):
                emit(attempt(region))


def attempt(region: RegionSource) -> str | None:
    """Compile a region; returns the text of an error."""
    try:
        region.compile_only()
    except Exception as error:  # such as collectives, whose groups only ranks have: the rank compiles it
        return f"{type(error).__name__}: {error}"
    return None


def locked(region: RegionSource) -> Any:
    """A lock of all processes of this user on this machine for one region, held as long as the file is open."""
    folder = Path(tempfile.gettempdir()) / f"autopar-compile-{getpass.getuser()}"
    folder.mkdir(exist_ok=True)
    text = f"{torch.__version__}\n{region.module.code}\n{region.arguments}"
    file = (folder / hashlib.sha256(text.encode()).hexdigest()).open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
