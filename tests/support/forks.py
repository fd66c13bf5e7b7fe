"""Processes that start as copies of one that has imported torch and autopar: for ranks whose start is not tested."""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.effort import full

from autopar.measure.workers import HOST, free_port

SCRIPTS = Path(__file__).parent  # those that several test modules or ranks run
PATIENT_SECONDS = 5.0  # for ranks that are told to end
Done = subprocess.CompletedProcess[str]


def run_ranks(number: int, script: Path, *arguments: str, folder: Path | None = None) -> Done:
    """A script as so many ranks of torchrun; in a full run that is who starts them.

    Args:
        folder: to run in.
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
    """What a script printed in a process for each of some additions to the environment, and the first bad exit code."""
    process = server()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, error)]
        request = {
            "script": str(script), "arguments": arguments, "folder": str(folder or Path.cwd()), "files": files,
            "environments": [os.environ | {"OMP_NUM_THREADS": "1"} | dict(each) for each in more],
        }  # fmt: skip
        print(json.dumps(request), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        out.seek(0)
        error.seek(0)
        return Done([str(script), *arguments], code, out.read(), error.read())


@functools.cache
def server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "support.forks"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    atexit.register(process.stdin.close)
    return process


# -- in the server -----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Run what is asked for, one script after the other."""
    for line in sys.stdin:
        request = json.loads(line)
        ranks = []
        for environment in request["environments"]:
            if not (rank := os.fork()):
                become(request, environment)
                return
            ranks.append(rank)
        print(first_failure(ranks), flush=True)


def become(request: Mapping, environment: Mapping[str, str]) -> None:
    """Run the script as if this process had been started for it."""
    for number, file in enumerate((os.devnull, *request["files"])):
        opened = os.open(file, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    runpy.run_path(request["script"], run_name="__main__")


def first_failure(ranks: Sequence[int]) -> int:
    """The exit code of the first process that failed, after which the others are ended; 0 if all went well."""
    running, code, deadline = set(ranks), 0, float("inf")
    while running:
        rank, status = os.waitpid(-1, os.WNOHANG)
        if rank:
            running.discard(rank)
            if (failed := os.waitstatus_to_exitcode(status)) and not code:
                code, deadline = failed, time.monotonic() + PATIENT_SECONDS
                signal_all(running, signal.SIGTERM)
        elif time.monotonic() > deadline:
            deadline = float("inf")
            signal_all(running, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return code


def signal_all(ranks: set[int], number: signal.Signals) -> None:
    for rank in ranks:
        os.kill(rank, number)


if __name__ == "__main__":
    import timm  # noqa: F401
    import torch

    import autopar

    torch.set_num_threads(1)
    assert autopar.parallelize and autopar.plan  # which imports them
    serve()


def run_on_two(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A script on two ranks as torchrun starts them."""
    (folder / "script.py").write_text(script)
    return run_ranks(2, folder / "script.py", folder=folder)
