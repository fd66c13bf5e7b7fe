"""Compilation of a rank's regions by several processes, before the rank needs them.

torch.compile works on one region at a time and on one core for most of it. Workers compile the regions into torch's
caches on disk; the rank then finds them there. The workers are forks of a server that imports the compiler while this
process plans. A region is compiled once for a device, also if several processes ask for it.
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
from uuid import uuid4
from warnings import warn

import torch
import torch.distributed as dist

from autopar import __version__
from autopar.codegen.compile import RegionSource
from autopar.errors import CompileAheadWarning, UsageError, WorkerError, caller_level
from autopar.measure.workers import Emit, WorkerLimits, run_workers
from autopar.runtime.launch.fork_server import FORKS, ForkServer, surroundings, worker_environment
from autopar.runtime.launch.torch_settings import TorchSettings

WORKERS = "AUTOPAR_COMPILE_WORKERS"  # environment variable: processes of a rank
MIN_REGIONS = 3  # that are worth the start of processes
# By default a rank on a GPU has a worker for each of its cores where the code of new regions is long. With workers that
# were requested, Swin-S (13 regions, 712 lines) reached its first step in 62 s instead of 101, MaxViT-T (10, 928) in
# 119 instead of over 200. ViT-B (3) and ResNet-50 (13, 305) gained nothing (H200).
DEFAULT_MIN_LINES, DEFAULT_MIN_CORES = 500, 4
LIMIT_SECONDS = 600.0  # without a region compiled; the rank then compiles what is left
COMPILER = "torch._inductor.compile_fx"
ENTRY = f"{__name__}:run"
PRELOADED = ("autopar.measure.compile_preload",)
server: ForkServer | None = None


@dataclass(frozen=True)
class Work:
    """Regions for the workers of a rank to compile, and the settings to compile them under.

    Args:
        regions: largest first, each with the file among torch's caches that says that it has been compiled.
        compilers: processes in which torch.compile makes kernels for one worker.
        state: of the rank; torch's caches are kept by it.
        name: of this work, in the files of regions that could not be compiled.
    """

    regions: Sequence[tuple[Path, RegionSource]]
    compilers: int
    state: State
    name: str


@dataclass(frozen=True)
class State:
    """Settings of a process that torch's caches are kept by.

    Args:
        threads: for which code for a CPU is made.
        matmul_precision: of GPUs as torch spells it: caches for "none" and "ieee", the same, differ.
    """

    settings: TorchSettings
    matmul_precision: str
    threads: int

    @staticmethod
    def current() -> State:
        precision = str(torch.backends.cuda.matmul.fp32_precision)
        return State(TorchSettings.current(), precision, torch.get_num_threads())

    @contextmanager
    def active(self) -> Iterator[None]:
        torch.set_num_threads(self.threads)
        with self.settings.active():
            if torch.backends.cuda.matmul.fp32_precision != self.matmul_precision:
                torch.backends.cuda.matmul.fp32_precision = self.matmul_precision
            yield


def prepare_compilers(device_type: str) -> None:
    """Start the server if ranks on such devices may use workers; its imports overlap with this process's work.

    Raises:
        UsageError: AUTOPAR_COMPILE_WORKERS is no number of processes.
    """
    if most_workers(device_type) > 1:
        start_server()


def start_server() -> None:
    """Start the server that workers are forks of, unless it runs under the same environment."""
    global server
    if FORKS:
        # torch.cuda.is_available, which imports call, must not start CUDA in a process that forks; nor may a pool of
        # compilers start there.
        environment = worker_environment(1) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}
        if server is None or server.process.poll() is not None or server.surroundings != surroundings(environment):
            server = ForkServer(environment, PRELOADED)


def compile_ahead(regions: Sequence[RegionSource]) -> None:
    """Compile regions into torch's caches, those that have not been compiled there yet.

    A region that a worker cannot compile is left to the rank, whose own compilation says why.

    Raises:
        UsageError: AUTOPAR_COMPILE_WORKERS is no number of processes.
    """
    global server
    try:
        types = {region.device.type for region in regions}
        most = min((most_workers(device_type) for device_type in types), default=0)
        state = State.current()
        if most > 1 and (new := new_regions(regions, state)):
            compile_in_workers(new, min(most, len(new)), state)
    finally:
        server = None  # ends it


def new_regions(regions: Sequence[RegionSource], state: State) -> list[tuple[Path, RegionSource]]:
    """Regions that torch's caches lack, longest code first; none where workers would not pay."""
    files = ((done_file(region, state), region) for region in regions)
    new = sorted(((file, region) for file, region in files if not file.exists()), key=lambda r: -len(r[1].code))
    min_lines = DEFAULT_MIN_LINES if requested_workers() is None else 0
    long = sum(region.code.count("\n") for _, region in new) >= min_lines
    return new if len(new) >= MIN_REGIONS and long else []


def compile_in_workers(new: Sequence[tuple[Path, RegionSource]], workers: int, state: State) -> None:
    """Let workers compile regions, and wait for them."""
    start_server()
    importing = threading.Thread(target=importlib.import_module, args=(COMPILER,))  # this process needs it too
    importing.start()
    work = Work(new, max(1, cores() // workers), state, uuid4().hex)
    limits, failure = WorkerLimits(LIMIT_SECONDS), f"none was ready within {LIMIT_SECONDS:.0f} s"
    try:
        ended = run_workers(ENTRY, work, workers, None, limits, lambda *_: True, name="compile", server=server)
        if not ended.timed_out:
            failure = "" if ended.failed_rank is None else ended.last_lines[ended.failed_rank]
    except WorkerError as error:
        failure = str(error)
    if failure:
        message = f"Processes that compile ahead failed, and this one compiles in their place: {failure}"
        warn(message, CompileAheadWarning, stacklevel=caller_level())
    importing.join()


def requested_workers() -> int | None:
    """Processes of a rank that the environment asks for; None without the variable.

    Raises:
        UsageError: the variable is no such number.
    """
    text = os.environ.get(WORKERS)
    if text is not None and not text.isdecimal():
        raise UsageError(f"{WORKERS}={text!r} must be a number of processes, 0 for none.")
    return None if text is None else int(text)


def most_workers(device_type: str) -> int:
    """Most workers of a rank on a device: those that the environment asks for, else its cores, and none on CPU.

    Raises:
        UsageError: AUTOPAR_COMPILE_WORKERS is no number of processes.
    """
    requested = requested_workers()
    if requested is None:
        return cores() if device_type == "cuda" and cores() >= DEFAULT_MIN_CORES else 0
    return requested


def cores() -> int:
    """Cores of this machine for each of its ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or min(world, max(1, torch.cuda.device_count())))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def run(work: Work, emit: Emit) -> None:
    """Compile regions until none is left; emits None for each that this worker has compiled."""
    import torch._inductor.config as inductor_config  # not public, as all of torch.compile's settings

    inductor_config.compile_threads = work.compilers
    with work.state.active():
        for wait in (False, True):  # then wait for those that others still compile, so that the rank finds all
            for file, region in work.regions:
                with locked(file, wait) as notes:
                    if notes is None or file.exists() or work.name in notes.read():
                        continue
                    if region.device.type == "cuda":
                        torch.cuda.set_device(region.device)
                    if error := attempt(region):
                        notes.write(f"{work.name} {error}\n")
                    else:
                        file.touch()
                    emit(None)


def attempt(region: RegionSource) -> str:
    """Compile a region; returns the text of an error, or nothing."""
    try:
        region.compile()
    except Exception as error:  # such as collectives, whose groups only ranks have: the rank compiles it
        return f"{type(error).__name__}: {error}"
    return ""


def done_file(region: RegionSource, state: State) -> Path:
    """File among torch's caches that says that a region has been compiled into them."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # not public in torch 2.11 to 2.15

    name = torch.cuda.get_device_name(region.device) if region.device.type == "cuda" else ""
    parts = __version__, torch.__version__, region.device, name, region.code, region.arguments, region.options
    folder = Path(cache_dir()) / "autopar"
    folder.mkdir(exist_ok=True)
    return folder / hashlib.sha256(repr((*parts, state)).encode()).hexdigest()


@contextmanager
def locked(file: Path, wait: bool) -> Iterator[IO[str] | None]:
    """Notes on a region, locked for all processes as long as they are open; None if another process has them."""
    with file.with_suffix(".notes").open("a+") as notes:
        try:
            fcntl.flock(notes, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            notes.seek(0)
            yield notes
