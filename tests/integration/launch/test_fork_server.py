"""Worker processes that are forked: what they take over from their caller, and what each end leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from support.faults import alive, wait_for, workers
from support.handmade import plan_by_hand
from torch import nn

import autopar
from autopar import WorkerError
from autopar.runtime.launch import fork_server as launch
from autopar.runtime.launch.fork_server import ForkServer, Process, fork_server, worker_environment

X, Y = torch.randn(6, 8), torch.randint(0, 4, (6,))
END_SECONDS = 10.0  # for processes to end


def server() -> ForkServer:
    return fork_server(worker_environment(1))


def run(code: str, **options: Any) -> Process:
    """Code in a fork of this process's server."""
    environment = worker_environment(1)
    return fork_server(environment).start(exec, code, {}, **{"environment": environment, **options})


def printed(code: str, **options: Any) -> list[str]:
    """Lines that code prints in a fork, which must succeed."""
    reading, writing = os.pipe()
    process = run(code, stdout=writing, **options)
    os.close(writing)
    with os.fdopen(reading) as file:
        lines = file.read().splitlines()
    assert process.wait(END_SECONDS) == 0
    return lines


def started(loss_fn: Any = F.cross_entropy) -> autopar.ParallelModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = plan_by_hand(model, X, 3, ["2.linear"])
    return autopar.parallelize(model, 2, X, loss_fn=loss_fn, plan=plan)


# -- what a fork takes over --------------------------------------------------------------------------------------------


def test_a_fork_has_the_callers_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server()
    (tmp_path / "mine.py").write_text("print('imported from sys.path')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    before = os.umask(0o027)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        found = printed(
            "import mine, os, signal, sys; print(os.getcwd(), os.environ['RANK'], f'{os.umask(0):o}', sep='\\n');"
            "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), sys.stdin.read(), os.getsid(0) == os.getpid())"
        )
    finally:
        os.umask(before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert found == ["imported from sys.path", str(tmp_path), "3", "27", "{<Signals.SIGUSR1: 10>}  True"]
    assert server() is first


@pytest.mark.full
def test_a_variable_that_an_import_may_read_makes_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    first, kept = server(), run("import time; time.sleep(60)")
    pid = kept.pid
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    code = "import os, torch; print(os.environ['MKL_CBWR'], os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    assert printed(code) == ["COMPATIBLE 1 1"]
    second = server()
    assert second is not first and kept.poll() is None  # a server stays while something that it forked is in use
    process = first.process
    del first, kept
    assert process.wait(END_SECONDS) == -signal.SIGKILL
    wait_for(lambda: not alive(pid), END_SECONDS)
    assert fork_server(worker_environment(2)) is not second


def test_forks_draw_other_random_numbers() -> None:
    code = "import numpy, random; print(random.random(), numpy.random.rand())"
    one, other = (printed(code)[0].split() for _ in range(2))
    assert one[0] != other[0] and one[1] != other[1]


def test_output_goes_where_the_callers_goes_at_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("import sys; print('out'); print('error', file=sys.stderr)").wait(END_SECONDS) == 0
    assert run("raise LookupError('not here')").wait(END_SECONDS) == 1
    told = capfd.readouterr()
    assert told.out == "out\n" and told.err.startswith("error\n") and told.err.endswith("LookupError: not here\n")


def test_an_exit_is_one_of_an_interpreter() -> None:
    assert printed("import atexit; atexit.register(print, 'bye'); print('hello')") == ["hello", "bye"]
    assert run("raise SystemExit(7)").wait(END_SECONDS) == 7


def test_the_server_holds_no_context_and_no_thread() -> None:
    run("").wait(END_SECONDS)  # its imports are over
    status = Path(f"/proc/{server().process.pid}/status").read_text()
    assert "\nThreads:\t1\n" in status
    code = "import sys, torch; print(torch.cuda.is_initialized(), 'torch._dynamo' in sys.modules)"
    assert printed(code) == ["False True"]


def test_a_fork_has_no_files_of_others() -> None:
    others = [run("import time; time.sleep(60)") for _ in range(2)]
    files = "[name for name in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{name}')]"
    assert printed(f"import os; print(*sorted({files}))") == ["0 1 2"]
    for other in others:
        other.kill()
        assert other.wait(END_SECONDS) == -signal.SIGKILL


def test_a_closed_stdout_is_nothing() -> None:
    closed = os.dup(0)
    os.close(closed)
    assert run("print('unheard')", stdout=closed).wait(END_SECONDS) == 0


# -- pools -------------------------------------------------------------------------------------------------------------


def test_a_second_model_reuses_the_server() -> None:
    losses = []
    for _ in range(2):
        with started() as pm:
            losses.append(pm.forward_backward(X, Y).loss)
            assert len(workers()) == 2
        assert not workers()
        losses.append(launch.current)
    assert losses[:2] == losses[2:]


def test_a_server_that_is_killed_takes_its_workers_along() -> None:
    pm = started()
    before, pids = server(), workers()
    before.process.kill()
    wait_for(lambda: not any(map(alive, pids.values())), END_SECONDS)
    with pytest.raises(
        WorkerError,
        match=r"died during .*: killed by SIGKILL, because the fork server ended \(killed by SIGKILL\)\. All other",
    ):
        pm.forward_backward(X, Y)
    with started() as again:
        assert again.forward_backward(X, Y).loss > 0
    assert server() is not before


def test_a_server_that_ends_before_it_forks_is_an_error() -> None:
    broken = ForkServer(worker_environment(1), ["no_such_module"])
    with pytest.raises(
        WorkerError, match=r"the fork server has ended, exit code 1\.(?s:.*)No module named 'no_such_module'"
    ):
        broken.start(print, environment={})
    killed = ForkServer(worker_environment(1))
    killed.process.send_signal(signal.SIGSTOP)  # the request waits
    threading.Timer(0.5, killed.process.kill).start()
    with pytest.raises(WorkerError, match="the fork server has ended, killed by SIGKILL"):
        killed.start(print, environment={})


@pytest.mark.full
def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cloudpickle.py").write_text("raise SystemExit('foreign code ran')")
    environment = worker_environment(1)
    code = "import cloudpickle; raise SystemExit(7)"
    assert ForkServer(environment).start(exec, code, {}, environment=environment).wait(60) == 7


def leave(reason: str) -> None:
    raise SystemExit(reason)


class Leaving:
    """A loss function of a module that leaves when a worker imports it."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)

    def __reduce__(self) -> Any:
        return leave, ("no licence",)


def test_a_worker_that_leaves_in_its_start_says_why() -> None:
    with pytest.raises(WorkerError, match="failed during start: SystemExit: no licence"):
        started(Leaving())


@pytest.mark.full
def test_without_forks_each_worker_is_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FORKS", False)
    monkeypatch.setattr(launch, "current", None)
    process = run("import time; time.sleep(60)")
    assert process.poll() is None
    process.kill()
    assert process.wait(END_SECONDS) == -signal.SIGKILL and process.ending() == "killed by SIGKILL"
    with started() as pm:
        assert pm.forward_backward(X, Y).loss > 0


SCRIPT = """
import os, signal, sys, time, torch, autopar
from torch import nn
from autopar.runtime.launch.fork_server import fork_server, worker_environment
from support import traces; traces.share()

mode, x, y = sys.argv[1], torch.randn(6, 8), torch.randint(0, 4, (6,))

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
pm = autopar.parallelize(model, 2, x, microbatches=3, pp=2, pins={"2.linear": 1})
pm.forward_backward(x, y)
if mode == "fork" and not (child := os.fork()):
    environment = worker_environment(1)
    assert fork_server(environment).start(exec, "raise SystemExit(7)", {}, environment=environment).wait() == 7
    sys.exit()  # and does not end its parent's workers
if mode == "fork":
    assert os.waitpid(child, 0)[1] == 0
    pm.forward_backward(x, y)
    print("goes on")
if mode == "killed" and not os.fork():
    time.sleep(5)  # holds copies of all files of its parent
    os._exit(0)
if mode == "killed":
    print("ready", flush=True)
    time.sleep(60)
"""


def script(folder: Path, mode: str) -> subprocess.Popen[str]:
    """A script without a guard of its main part."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", mode]
    return subprocess.Popen(
        command, cwd=folder, env=worker_environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
@pytest.mark.parametrize(("mode", "out"), [("plain", ""), ("fork", "goes on\n")])
def test_a_script_and_its_own_forks(tmp_path: Path, mode: str, out: str) -> None:
    done = script(tmp_path, mode)
    told, errors = done.communicate(timeout=100)
    assert (done.returncode, told) == (0, out), errors


def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    caller = script(tmp_path, "killed")
    assert caller.stdout is not None and caller.stdout.readline() == "ready\n", caller.communicate()
    running = workers(caller.pid)
    (server,) = {psutil.Process(pid).ppid() for pid in running.values()}
    os.kill(running[1], signal.SIGSTOP)  # it does not notice by itself
    caller.kill()
    wait_for(lambda: not any(map(alive, (server, *running.values()))), END_SECONDS)
    assert len(running) == 2
    caller.communicate()
