"""The worker pool of a plain script: where it listens, threads that share it, Ctrl-C, and what it leaves behind."""

from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from support.faults import FAULT_SECONDS, alive, mlp, wait_for, workers
from support.handmade import plan_by_hand
from torch import nn

import autopar
from autopar import UsageError, WorkerError
from autopar.runtime.launch.fork_server import fork_server, worker_environment
from autopar.runtime.launch.pool import EXIT_SECONDS, WorkerPool
from autopar.runtime.launch.shared_memory import SharedMemory

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
X, Y = torch.randn(6, 8), torch.randint(0, 4, (6,))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert workers() == {}


def start(loss_fn: Any = F.cross_entropy, dp: int = 1, late: bool = False, **options: Any) -> autopar.ParallelModel:
    """A model on two workers: two stages or two replicas.

    Args:
        late: reply to steps as workers on GPUs do.
    """
    torch.manual_seed(0)
    plan = plan_by_hand(mlp(), X, 3, ["2.linear"] if dp == 1 else [], dp=dp)
    pm = autopar.parallelize(mlp(), 2, X, loss_fn=loss_fn, optimizer=ADAMW, plan=plan, **options)
    if late:
        pool(pm).on_gpu = [True, True]
    return pm


def pool(pm: autopar.ParallelModel) -> WorkerPool:
    assert isinstance(pm._ranks, WorkerPool)
    return pm._ranks


# -- the network -------------------------------------------------------------------------------------------------------


def listening() -> set[tuple[str, str, int | None]]:
    """Address, port and process of each TCP socket that listens."""
    listeners = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {(*map(str, c.laddr), c.pid) for c in listeners}  # type: ignore[misc]


@pytest.mark.parametrize("dp", [1, 2])
def test_all_sockets_that_listen_are_on_the_loopback_interface(dp: int) -> None:
    before = listening()
    with start(dp=dp) as pm:
        pm.train_step(X, Y)
        server = fork_server(worker_environment(1)).process.pid
        processes = {os.getpid(), server, *workers().values()}
        addresses = [ip for ip, _, pid in listening() - before if pid in processes]
    assert len(addresses) >= 3 and set(addresses) == {"127.0.0.1"}, addresses


# -- threads -----------------------------------------------------------------------------------------------------------


def test_another_thread_reads_results_while_the_loop_steps() -> None:
    results: queue.Queue[Any] = queue.Queue()
    read: list[float] = []
    errors: list[BaseException] = []

    def log() -> None:
        try:
            while (result := results.get()) is not None:
                read.append(result.loss)
        except BaseException as error:
            errors.append(error)

    with start(late=True) as pm:
        threads = [threading.Thread(target=log, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(200):
            result = pm.train_step(X, Y)
            results.put(result)
            if step % 3 == 0:
                results.put(result)
                assert result.loss > 0
        for _ in threads:
            results.put(None)
        for thread in threads:
            thread.join()
    assert not errors and len(read) == 267


def test_another_thread_closes_the_model_between_two_steps() -> None:
    pm = start(late=True)
    closing = threading.Timer(0.3, pm.close)
    closing.start()
    with pytest.raises(UsageError, match=r"workers are gone: closed\. Call"):
        while True:
            pm.train_step(X, Y)
    closing.join()


# -- ends --------------------------------------------------------------------------------------------------------------

CALLER = """
import os, sys, time, torch, autopar
from torch import nn
from autopar.runtime.launch import fork_server

fork_server.FORKS &= "interpreters" not in sys.argv
model, x, y = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 8), torch.randint(0, 4, (6,))

def loss_fn(output, target):
    print("text in the buffer")
    print("error in the buffer", end="", file=sys.stderr)
    return nn.functional.cross_entropy(output, target)

pm = autopar.parallelize(model, 2, x, loss_fn=loss_fn, microbatches=3, pp=2, pins={"2.linear": 1})
pm.forward_backward(x, y)
if "child" in sys.argv and not os.fork():
    time.sleep(30)  # holds copies of all files of its parent
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


def buffered() -> dict[str, str]:
    """Environment of a process whose output has a buffer."""
    return {name: value for name, value in worker_environment(1).items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.full
@pytest.mark.parametrize("modes", [["interpreters"], ["interpreters", "child"], ["forks", "child"]], ids=" ".join)
def test_no_worker_outlives_a_caller_that_is_killed(modes: list[str], tmp_path: Path) -> None:
    """Whatever became of the caller's output, and of processes that it has forked."""
    (tmp_path / "script.py").write_text(CALLER)
    caller = subprocess.Popen(
        [sys.executable, "script.py", *modes],
        cwd=tmp_path, env=buffered(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert caller.stdout is not None and caller.stderr is not None
    lines = [caller.stdout.readline()]
    while lines[-1] not in ("ready\n", ""):
        lines.append(caller.stdout.readline())
    family = psutil.Process(caller.pid).children(recursive=True)
    try:
        assert lines[-1] == "ready\n", caller.stderr.read()
        ranks = [process for process in family if process.name().startswith("autopar:rank")]
        assert len(ranks) == 2
        caller.stdout.close()
        caller.stderr.close()
        caller.kill()
        caller.wait()
        wait_for(lambda: not any(alive(process.pid) for process in ranks), FAULT_SECONDS)
    finally:
        for process in family:
            if alive(process.pid):
                process.kill()


@pytest.mark.parametrize("state", ["gone", "full", "closed"])
def test_an_exit_waits_for_no_reader_of_the_output(state: str) -> None:
    close = "sys.stdout.close()" if state == "closed" else ""
    code = (
        "import sys; from autopar.runtime.launch.worker import exit_now; sys.stdout.reconfigure(write_through=False);"
        f"sys.stdout.write('text in the buffer'); {close}; exit_now()"
    ).replace("; ;", ";")
    reading, writing = os.pipe()
    if state == "full":
        os.set_blocking(writing, False)
        os.write(writing, bytes(1 << 20))
        os.set_blocking(writing, True)
    environment = worker_environment(1)
    process = fork_server(environment).start(exec, code, {}, environment=environment, stdout=writing)
    os.close(writing)
    if state == "gone":
        os.close(reading)
    assert process.wait(FAULT_SECONDS) == 0
    if state != "gone":
        os.close(reading)


def test_close_ends_workers_immediately_although_a_forked_process_holds_their_connections() -> None:
    pm = start()
    pm.train_step(X, Y)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        processes, begun = list(pool(pm).processes), time.monotonic()
        pm.close()
        assert time.monotonic() - begun < EXIT_SECONDS / 3
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def state_of_this_process() -> tuple[int, int, int, set[Path]]:
    """Open files, threads, child processes, and files in shared memory."""
    own = psutil.Process()
    return own.num_fds(), own.num_threads(), len(own.children(recursive=True)), set(Path("/dev/shm").iterdir())


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.full)])
def test_rounds_of_start_and_close_leave_this_process_as_it_was(rounds: int) -> None:
    kept: list[autopar.ParallelModel] = []  # a closed model holds no port and no thread, even while it is referenced
    with start() as pm:
        pm.train_step(X, Y)
    kept.append(pm)
    before = state_of_this_process()
    for _ in range(rounds):
        with start() as pm:
            pm.train_step(X, Y)
        kept.append(pm)
    wait_for(lambda: state_of_this_process() == before, FAULT_SECONDS)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_start_shares_the_weights_of_one_rank_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 4))
    model_bytes = sum(p.nbytes for p in model.parameters())
    files: set[int] = set()
    sizes: list[int] = []
    write = SharedMemory.write

    def recorded(memory: SharedMemory, tensors: Any) -> Any:
        slots = write(memory, tensors)
        files.add(memory.fd)
        sizes.append(sum(os.fstat(fd).st_size for fd in files))
        return slots

    monkeypatch.setattr(SharedMemory, "write", recorded)
    x = torch.randn(6, 1024)
    plan = plan_by_hand(model, x, 2, [], dp=3)
    with autopar.parallelize(model, 3, x, optimizer=ADAMW, plan=plan) as pm:
        assert model_bytes <= max(sizes) < 1.1 * model_bytes
        assert [os.fstat(channel.sending.fd).st_size for channel in pool(pm).channels] == [0, 0, 0]
        state = pm.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_start_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(fd: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.runtime.launch.shared_memory.allocate", refuses)
    expected = r"start has no room .* of rank 0 .*: No space left .*\. Give the machine or container more memory"
    with pytest.raises(UsageError, match=expected):
        start()


# -- waits -------------------------------------------------------------------------------------------------------------


def test_workers_that_all_hang_end_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.launch.replies.ANSWER_SECONDS", 0.3)
    pm = start(timeout=1.0)
    for pid in workers().values():
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        WorkerError, match=r"(?s)Rank 0 .* failed during stats: no reply, and it does not say where it is.*Rank 1, in"
    ):
        pm.stats()


def test_a_rank_that_computes_for_longer_than_the_timeout_is_waited_for() -> None:
    def slow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(2.0)
        return F.cross_entropy(output, target)

    torch.manual_seed(0)
    plan = plan_by_hand(mlp(), X, 1, ["2.linear"])
    with autopar.parallelize(mlp(), 2, X, loss_fn=slow, plan=plan, timeout=30.0) as pm:
        pool(pm).limit.timeout_seconds = 0.3  # shorter than that of the ranks' waits for each other
        expected = "^No rank has replied to forward_backward for 1.3 s: rank 1 is still computing, in action 1F0"
        with pytest.warns(UserWarning, match=expected) as told:
            assert pm.forward_backward(X, Y).loss > 0
    assert len(told) == 1


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def ctrl_c(seconds: float, times: int = 1) -> threading.Thread:
    """SIGINT to this process, some times."""

    def press() -> None:
        for _ in range(times):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "call",
    [
        lambda pm, result: pm.stats(),
        lambda pm, result: pm.state_dict(),
        lambda pm, result: pm.eval()(X),
        lambda pm, result: result.loss,
    ],
    ids=["stats", "state_dict", "forward", "loss"],
)
def test_ctrl_c_in_a_call_that_only_reads_keeps_the_model(call: Callable[[Any, Any], Any]) -> None:
    with start() as pm:
        expected = [pm.train_step(X, Y).loss for _ in range(2)]
    with start(late=True) as pm:
        result = pm.train_step(X, Y)
        pids = workers()
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        pressing = ctrl_c(0.3)
        threading.Timer(0.6, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids.values()]).start()
        with pytest.raises(KeyboardInterrupt):
            call(pm, result)
        pressing.join()
        assert call(pm, result) is not None
        assert [result.loss, pm.train().train_step(X, Y).loss] == expected


def test_a_second_ctrl_c_ends_a_call_that_only_reads() -> None:
    pm = start()
    for pid in workers().values():
        os.kill(pid, signal.SIGSTOP)
    pressing = ctrl_c(0.3, times=2)
    with pytest.raises(KeyboardInterrupt):
        pm.stats()
    pressing.join()
    with pytest.raises(UsageError, match="workers are gone: Ctrl-C during stats"):
        pm.stats()


def test_ctrl_c_in_a_training_call_ends_the_model_and_says_why() -> None:
    pm = start()
    pm.train_step(X, Y)  # sends the programs
    for pid in workers().values():
        os.kill(pid, signal.SIGSTOP)
    pressing = ctrl_c(0.3)
    with pytest.raises(KeyboardInterrupt):
        pm.train_step(X, Y)
    pressing.join()
    with pytest.raises(
        UsageError, match=r"workers are gone: Ctrl-C during train_step, which some ranks may have done and others not\."
    ):
        pm.state_dict()
