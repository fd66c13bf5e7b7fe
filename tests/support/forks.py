"""Ranks forked from a server that has imported torch and autopar, for tests that do not test how ranks start."""

from __future__ import annotations

import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.runtime.launch.fork_server import MODULES, ForkServer, Process, worker_environment
from autopar.runtime.launch.loopback import HOST
from support.effort import full
from support.faults import free_port

SCRIPTS = Path(__file__).parent  # folder of the scripts that ranks run
PATIENT_SECONDS = 5.0  # between SIGTERM and SIGKILL
Done = subprocess.CompletedProcess[str]


def run_ranks(number: int, script: Path, *arguments: str, folder: Path | None = None) -> Done:
    """Result of a script on ``number`` ranks with torchrun's environment; in a full run torchrun itself starts them.

    Args:
        folder: working folder.
    """
    if full():
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", str(script), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return subprocess.run(
            [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=400
        )
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    world = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "GROUP_WORLD_SIZE": "1"}
    ranks = [meeting | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return forked(script, arguments, ranks, folder)


def forked(script: Path, arguments: Sequence[str], more: Sequence[Mapping[str, str]], folder: Path | None) -> Done:
    """Output of a script that runs once per environment, and the first exit code that is not 0.

    Args:
        more: variables of each process, beyond those of this one.
        folder: working folder.
    """
    common = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        ranks = [
            server().start(
                run_script, str(script), list(arguments), str(folder or Path.cwd()), environment=common | dict(each),
                stdout=out.fileno(), stderr=error.fileno(),
            )
            for each in more
        ]  # fmt: skip
        code = first_failure(ranks)
        out.seek(0)
        error.seek(0)
        return Done([str(script), *arguments], code, out.read(), error.read())


@functools.cache
def server() -> ForkServer:
    """Fork server of this process, which ends with it."""
    return ForkServer(worker_environment(1), (*MODULES, "timm", "autopar.api.parallelize"))


def run_script(script: str, arguments: Sequence[str], folder: str) -> None:
    """Run a script as the main module of this process."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def first_failure(ranks: Sequence[Process]) -> int:
    """Exit code of the first process that fails, or 0; its failure ends the others."""
    code, deadline = 0, float("inf")
    while (codes := [rank.poll() for rank in ranks]).count(None):
        if not code and (code := next(filter(None, codes), 0)):
            deadline = time.monotonic() + PATIENT_SECONDS
            signal_all(ranks, signal.SIGTERM)
        if time.monotonic() > deadline:
            deadline = float("inf")
            signal_all(ranks, signal.SIGKILL)
        time.sleep(0.01)
    return code or next(filter(None, codes), 0)


def signal_all(ranks: Sequence[Process], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)


def run_on_two(folder: Path, script: str, *arguments: str) -> Done:
    """Result of a script on two ranks with torchrun's environment."""
    (folder / "script.py").write_text(script)
    return run_ranks(2, folder / "script.py", *arguments, folder=folder)
