"""Worker processes that measure: started like torchrun's, watched, and gone when the caller is.

`run_workers` starts ``python -m autopar.measure ENTRY FOLDER`` once per rank. ``ENTRY`` names a function
``run(payload, emit)``. The caller writes the payload into the folder; each ``emit(result)`` of a rank leaves one file
there, which the caller reads. Payload and results are pickled dataclasses. What a rank prints goes to ``RANK.log``,
and its last line is the reason of a failure.

Those that measure are fresh interpreters, not forks of a fork server: they run for longer than an import, in other
environments than workers, and no time should depend on memory that is shared with another process.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import torch

from autopar.runtime.launch.fork_server import ForkServer, Process
from autopar.runtime.launch.loopback import HOST, loopback_store, loopback_variables

PAYLOAD = "payload.pickle"
POLL_SECONDS = 0.1
END_SECONDS = 5.0
# Variables of a launcher around the caller, or of Slurm. They contradict those that are set for the workers.
FOREIGN = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")

Emit = Callable[[Any], None]


@dataclass(frozen=True)
class WorkerContext:
    """A worker's rank, the number of workers, this worker's device, and nodes that have equally many workers each."""

    rank: int
    world: int
    device: torch.device
    nodes: int = 1

    @property
    def per_node(self) -> int:
        """Number of workers on each node."""
        return self.world // self.nodes

    @staticmethod
    def current(device_type: str) -> WorkerContext:
        """The context of this process, from the variables that `start` sets; on a GPU it becomes the current device."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return WorkerContext(rank, world, device)


@dataclass(frozen=True)
class WorkersExit:
    """Exit of the workers of one run.

    Args:
        codes: exit code of each rank; None where the caller had to end it.
        last_lines: last line that each rank printed.
        timed_out: whether the time limit passed.
    """

    codes: tuple[int | None, ...]
    last_lines: tuple[str, ...]
    timed_out: bool

    @property
    def failed_rank(self) -> int | None:
        """The first rank with an exit code other than 0; None if there is none."""
        return next((rank for rank, code in enumerate(self.codes) if code), None)


@dataclass(frozen=True)
class WorkerLimits:
    """Seconds without progress until a run is given up, seconds that the others get once one rank has failed, and
    seconds of the whole run."""

    seconds: float
    grace_seconds: float = 0.0
    total_seconds: float = inf


def run_workers(
    entry: str,
    payload: object,
    world: int,
    threads: int | None,
    limits: WorkerLimits,
    on_result: Callable[[int, Any], bool],
    on_line: Callable[[str], bool] = lambda line: False,
    name: str = "workers",
    server: ForkServer | None = None,
) -> WorkersExit:
    """Run workers until all have ended, one has failed, or the time limit passes; no process is left.

    Args:
        entry: ``package.module:function``, called in each worker as ``function(payload, emit)``.
        threads: OMP_NUM_THREADS of each worker; None leaves the variable as it is.
        on_result: called with the rank and each result, in the order in which workers emitted them.
        on_line: called with each line that rank 0 prints.
        name: of the run; part of its temporary folder's name.
        server: whose forks the workers become; by default they are fresh interpreters.

    The time limit starts again whenever ``on_result`` or ``on_line`` returns True; that of the whole run does not.
    """
    with tempfile.TemporaryDirectory(prefix=f"autopar-{name}-") as text:
        folder = Path(text)
        (folder / PAYLOAD).write_bytes(pickle.dumps(payload))
        store = loopback_store()  # of all ranks, until they have ended
        processes: list[subprocess.Popen | Process] = []
        try:
            for rank in range(world):
                processes.append(start(entry, folder, rank, world, store.port, threads, server))
            timed_out = watch(processes, folder, limits, on_result, on_line)
            codes = tuple(p.poll() for p in processes)
        finally:
            end(processes)
        return WorkersExit(codes, tuple(last_line(folder / f"{rank}.log") for rank in range(world)), timed_out)


def watch(
    processes: Sequence[subprocess.Popen | Process],
    folder: Path,
    limits: WorkerLimits,
    on_result: Callable[[int, Any], bool],
    on_line: Callable[[str], bool],
) -> bool:
    """Hand over results and lines until the workers have ended or are given up; whether the time limit passed."""
    emitted = [0] * len(processes)
    lines = new_lines(folder / "0.log")
    last_moment = time.monotonic() + limits.total_seconds
    deadline = time.monotonic() + limits.seconds
    grace_deadline: float | None = None
    while True:
        codes = [p.poll() for p in processes]  # before reading: an ended process writes nothing more
        progress = [on_line(line) for line in next(lines)]
        progress += [on_result(rank, result) for rank, result in new_results(folder, emitted)]
        now = time.monotonic()
        if any(progress):
            deadline = now + limits.seconds
        if None not in codes:
            return False
        if grace_deadline is None and any(codes):
            grace_deadline = now + limits.grace_seconds
        if grace_deadline is not None and now >= grace_deadline:
            return False
        if grace_deadline is None and now > min(deadline, last_moment):
            return True
        time.sleep(POLL_SECONDS)


def new_results(folder: Path, emitted: list[int]) -> list[tuple[int, Any]]:
    """Ranks and results that were emitted since the last call, in the order of their files' times.

    Args:
        emitted: number of results that were read from each rank; updated.
    """
    results: list[tuple[int, int, Any]] = []
    for rank in range(len(emitted)):
        while (path := result_path(folder, rank, emitted[rank])).exists():
            results.append((path.stat().st_mtime_ns, rank, pickle.loads(path.read_bytes())))
            emitted[rank] += 1
    return [(rank, result) for _, rank, result in sorted(results, key=lambda r: r[0])]


def result_path(folder: Path, rank: int, number: int) -> Path:
    """File of a rank's result; results are numbered from 0."""
    return folder / f"{rank}.{number}.pickle"


def new_lines(log: Path) -> Iterator[list[str]]:
    """Lines of a growing file: each ``next`` yields those that were completed since the one before."""
    with log.open(errors="replace") as file:
        rest = ""
        while True:
            *lines, rest = (rest + file.read()).split("\n")
            yield lines


def start(
    entry: str, folder: Path, rank: int, world: int, port: int, threads: int | None, server: ForkServer | None
) -> subprocess.Popen | Process:
    """Start one rank, with torchrun's variables and its output in ``RANK.log``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    environment |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": HOST, "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path),
        # As torchrun's: the store is served by the caller, so rank 0 opens none.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    } | loopback_variables(os.environ)  # fmt: skip
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (folder / f"{rank}.log").open("wb") as log:
        if server is not None:
            out = log.fileno()
            return server.start(carry_out, entry, folder, environment=environment, stdout=out, stderr=out)
        return subprocess.Popen(
            # -P: modules come from the caller's path only, not from the current directory.
            [sys.executable, "-P", "-m", "autopar.measure", entry, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,  # closes with this process, however that ends
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def end(processes: Sequence[subprocess.Popen | Process]) -> None:
    """Terminate the processes that still run; kill those that ignore it for END_SECONDS."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        if isinstance(process, subprocess.Popen) and process.stdin is not None:
            process.stdin.close()


def last_line(log: Path) -> str:
    """Last line of a file that is not empty."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "nothing"


# -- in the worker -------------------------------------------------------------------------------------------------


def carry_out(entry: str, folder: Path) -> NoReturn:
    """Call the entry function with the folder's payload; ends the process. A failure's last line is its reason."""
    code = 0
    try:
        module, _, function = entry.partition(":")
        payload = pickle.loads((folder / PAYLOAD).read_bytes())
        getattr(importlib.import_module(module), function)(payload, emitter(folder, int(os.environ["RANK"])))
    except SystemExit as error:
        code = int(error.code or 0)
    except Exception as error:
        code = 1
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        print(f"{type(error).__name__}: {first_line}")
    sys.stdout.flush()
    os._exit(code)  # threads of a process group or a compiler may keep an ordinary exit waiting for ever


def emitter(folder: Path, rank: int) -> Emit:
    """A function that writes each result of a rank to the next file, which appears whole."""
    numbers = count()

    def emit(result: Any) -> None:
        path = result_path(folder, rank, next(numbers))
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(pickle.dumps(result))
        temporary.replace(path)

    return emit
