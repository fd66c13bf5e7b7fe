"""Compilation of a rank's regions by several processes, before the rank needs them.

torch.compile works on one region at a time and on one core for most of it. Workers compile the regions into torch's
caches on disk; the rank then finds them there. The workers are forks of a server that has imported the compiler while
this process planned. Ranks of one machine that have equal regions compile each once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from warnings import warn

import torch
import torch.distributed as dist

from autopar.codegen.compile import RegionSource
from autopar.errors import UsageError, WorkerError
from autopar.measure.workers import Emit, WorkerLimits, run_workers
from autopar.runtime.launch.fork_server import FORKS, ForkServer, worker_environment
from autopar.runtime.launch.torch_settings import TorchSettings

WORKERS = "AUTOPAR_COMPILE_WORKERS"  # environment variable: processes of a rank; none by default
FEWEST_REGIONS = 3  # that are worth the start of processes
LIMIT_SECONDS = 600.0  # without a region compiled; the rank then compiles what is left
COMPILER = "torch._inductor.compile_fx"
ENTRY = f"{__name__}:run"
PRELOADED = ("autopar.measure.compile_preload",)
server: ForkServer | None = None


@dataclass(frozen=True)
class Work:
    """Regions for the workers of a rank to compile, and the settings to compile them under.

    Args:
        compilers: processes in which torch.compile makes kernels for one worker.
        threads: of the rank, for which code for a CPU is made.
        settings: of the rank; torch's caches are kept by them.
        matmul_precision: of the rank's GPU as torch spells it: caches for "none" and "ieee", the same, differ.
    """

    regions: Sequence[RegionSource]
    compilers: int
    threads: int
    settings: TorchSettings
    matmul_precision: str


def prepare_compilers() -> None:
    """Start the server that workers are forks of; its imports overlap with this process's work.

    Raises:
        UsageError: AUTOPAR_COMPILE_WORKERS is no number of processes.
    """
    global server
    if FORKS and num_workers() > 1 and (server is None or server.process.poll() is not None):
        # torch.cuda.is_available, which imports call, must not start CUDA in a process that forks.
        environment = worker_environment(1) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        server = ForkServer(environment, PRELOADED)


def compile_ahead(regions: Sequence[RegionSource]) -> None:
    """Compile regions into torch's caches, those that no process of this machine has compiled yet.

    A region that a worker cannot compile is left to the rank, whose own compilation says why.

    Raises:
        UsageError: AUTOPAR_COMPILE_WORKERS is no number of processes.
    """
    global server
    if num_workers() < 2:
        return
    new = [region for region in regions if not done_file(region).exists()]
    if len(new) >= FEWEST_REGIONS:
        prepare_compilers()
        importing = threading.Thread(target=importlib.import_module, args=(COMPILER,))  # this process needs it too
        importing.start()
        workers = min(num_workers(), len(new))
        compilers = max(1, cores() // workers)
        order = tuple(sorted(new, key=lambda region: -len(region.module.code)))
        precision = str(torch.backends.cuda.matmul.fp32_precision)
        work = Work(order, compilers, torch.get_num_threads(), TorchSettings.current(), precision)
        limits = WorkerLimits(LIMIT_SECONDS)
        try:
            exit = run_workers(ENTRY, work, workers, None, limits, lambda *_: True, name="compile", server=server)
            failure = "" if exit.failed_rank is None else exit.last_lines[exit.failed_rank]
        except WorkerError as error:
            failure = str(error)
        if failure:
            warn(f"A process that compiles ahead failed, and this one compiles in its place: {failure}", stacklevel=1)
        importing.join()
    server = None  # ends it


def num_workers() -> int:
    """Processes that a rank compiles with.

    Raises:
        UsageError: the variable is no such number.
    """
    text = os.environ.get(WORKERS, "0")
    if not text.isdecimal():
        raise UsageError(f"{WORKERS}={text!r} must be a number of processes, 0 for none.")
    return int(text)


def cores() -> int:
    """Cores of this machine for each of its ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or min(world, max(1, torch.cuda.device_count())))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def run(work: Work, emit: Emit) -> None:
    """Compile regions until none is left; emits None for each that this worker has compiled."""
    import torch._inductor.config as inductor_config  # not public, as all of torch.compile's settings

    inductor_config.compile_threads = work.compilers
    torch.set_num_threads(work.threads)
    with work.settings.active():
        if torch.backends.cuda.matmul.fp32_precision != work.matmul_precision:
            torch.backends.cuda.matmul.fp32_precision = work.matmul_precision
        for wait in (False, True):  # then wait for those that others still compile, so that the rank finds all
            for region in work.regions:
                with locked(region, wait) as file:
                    if file is None or done_file(region).exists():
                        continue
                    if region.device.type == "cuda":
                        torch.cuda.set_device(region.device)
                    done_file(region).write_text(attempt(region))
                    emit(None)


def attempt(region: RegionSource) -> str:
    """Compile a region; returns the text of an error, or nothing."""
    try:
        region.compile_only()
    except Exception as error:  # such as collectives, whose groups only ranks have: the rank compiles it
        return f"{type(error).__name__}: {error}"
    return ""


def done_file(region: RegionSource) -> Path:
    """File among torch's caches that says that a region has been compiled into them."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # not public in torch 2.11 to 2.15

    device = torch.cuda.get_device_name(region.device) if region.device.type == "cuda" else "cpu"
    text = f"{torch.__version__}\n{device}\n{region.module.code}\n{region.arguments}\n{region.options}"
    folder = Path(cache_dir()) / "autopar"
    folder.mkdir(exist_ok=True)
    return folder / hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def locked(region: RegionSource, wait: bool) -> Iterator[IO[str] | None]:
    """A lock of all processes on one region, held as long as the file is open; None if another process has it."""
    with done_file(region).with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield file
