"""Workers and callers that are killed, hang, raise or leave: one clear error, and nothing left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.faults import FAULT_SECONDS, alive, mlp, wait_for, workers
from support.handmade import plan_by_hand
from torch import nn

import autopar
from autopar import UsageError, WorkerError
from autopar.errors import SEE_DOCTOR

X, Y = torch.randn(6, 8), torch.randint(0, 4, (6,))


def sleeping_loss(marker: Path) -> Callable[[Any, Any], torch.Tensor]:
    """A loss that says that it was reached and then sleeps."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        marker.touch()
        time.sleep(60)
        return F.cross_entropy(output, target)

    return loss_fn


def start(stages: int, loss_fn: Any, **options: Any) -> autopar.ParallelModel:
    plan = plan_by_hand(mlp(), X, 3, ["2.linear", "4.linear"][: stages - 1])
    return autopar.parallelize(mlp(), stages, X, loss_fn=loss_fn, plan=plan, **options)


def goes_on() -> None:
    """Check that this process can start and train another model."""
    with start(2, F.cross_entropy) as again:
        assert again.forward_backward(X, Y).loss > 0


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    assert workers() == {}
    assert set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_step_with_one_error(victim: int, tmp_path: Path) -> None:
    pm = start(2, sleeping_loss(tmp_path / "reached"))
    pids = workers()
    killed_at: list[float] = []

    def kill() -> None:
        wait_for((tmp_path / "reached").exists, 60)
        killed_at.append(time.monotonic())
        os.kill(pids[victim], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError) as error:
        pm.forward_backward(X, Y)
    assert time.monotonic() - killed_at[0] < FAULT_SECONDS
    killer.join()
    expected = (
        f"Rank {victim} (stage {victim}) died during forward_backward: killed by SIGKILL. All other ranks were ended."
    )
    assert str(error.value).startswith(expected) and SEE_DOCTOR in str(error.value)
    assert not any(map(alive, pids.values()))
    with pytest.raises(UsageError, match=f"workers are gone: Rank {victim} .*parallelize again"):
        pm.forward_backward(X, Y)
    if victim == 0:
        goes_on()


@pytest.mark.parametrize(
    ("firsts", "schedule", "victim", "name"),
    [
        ([], "1f1b", 1, "replica 1"),
        (["2.linear"], "1f1b", 2, "stage 1, replica 0"),
        (["1.relu", "2.linear", "4.linear"], "interleaved", 2, "stages 1 and 3, replica 0"),
    ],
    ids=["one stage", "two stages", "four stages on two"],
)
def test_a_killed_replica_ends_the_step(firsts: list[str], schedule: str, victim: int, name: str) -> None:
    pp, chunks = min(1 + len(firsts), 2), 2 if schedule == "interleaved" else 1
    plan = plan_by_hand(mlp(), X, 3, firsts, schedule, dp=2, chunks=chunks)
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    pm = autopar.parallelize(mlp(), 2 * pp, X, loss_fn=F.cross_entropy, optimizer=adam, plan=plan)
    pids = workers()
    assert pm.train_step(X, Y).loss > 0
    os.kill(pids[victim], signal.SIGSTOP)  # the other replica waits for its gradients
    threading.Timer(1.0, os.kill, (pids[victim], signal.SIGKILL)).start()
    start_seconds = time.monotonic()
    with pytest.raises(WorkerError, match=rf"Rank {victim} \({name}\) died during train_step: killed by SIGKILL"):
        pm.train_step(X, Y)
    assert time.monotonic() - start_seconds < FAULT_SECONDS
    assert not any(map(alive, pids.values()))


def test_a_replica_that_raises_is_named() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if 3 in target:
            raise ArithmeticError("no loss today")
        return F.cross_entropy(output, target)

    plan = plan_by_hand(mlp(), X, 3, ["2.linear"], dp=2)
    pm = autopar.parallelize(mlp(), 4, X, loss_fn=loss_fn, plan=plan)
    with pytest.raises(WorkerError, match=r"Rank 3 \(stage 1, replica 1\) failed .* in action 1F1: ArithmeticError"):
        pm.forward_backward(X, torch.tensor([0, 0, 0, 0, 3, 0]))


def test_a_hang_says_where_every_rank_is(tmp_path: Path) -> None:
    pm = start(3, sleeping_loss(tmp_path / "reached"), timeout=2.0)
    pids = workers()
    with pytest.raises(WorkerError) as error:
        pm.forward_backward(X, Y)
    message = str(error.value)
    first = "Rank 2 (stage 2) failed during forward_backward in action 2F0: no reply, it is still computing."
    assert message.startswith(first)
    assert "Rank 0, in action 0B0: " in message and "Rank 1, in action 1B0: " in message
    assert "time.sleep(60)" in message  # where in the user's code
    assert not any(map(alive, pids.values()))
    goes_on()


@pytest.mark.parametrize(
    ("failure", "of_machine"), [(ArithmeticError("no loss today"), False), (OSError(24, "no loss today"), True)]
)
def test_an_exception_on_one_rank_ends_all(failure: Exception, of_machine: bool) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise failure

    pm = start(2, loss_fn)
    pids = workers()
    with pytest.raises(
        WorkerError, match=r"Rank 1 \(stage 1\) failed .* in action 1F0: (Arithmetic|OS)Error: .*no loss today"
    ) as error:
        pm.forward_backward(X, Y)
    assert "Traceback" in str(error.value) and "raise failure" in str(error.value)
    assert (SEE_DOCTOR in str(error.value)) == of_machine
    assert not any(map(alive, pids.values()))
    goes_on()


class Unreadable:
    """Pickles, and raises an OSError when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("/nowhere/to/be/found",)


def test_an_argument_that_cannot_be_pickled_is_named_and_harms_nothing() -> None:
    with start(2, lambda output, target: F.cross_entropy(output, target["y"])) as pm:
        before = workers()
        with pytest.raises(UsageError, match=r"cannot send .*targets\[0\]\['lock'\], a lock, to the worker processes"):
            pm.forward_backward(X, {"y": Y, "lock": threading.Lock()})
        assert workers() == before and pm.num_drawn == 0
        assert pm.forward_backward(X, {"y": Y}).loss > 0 and pm.num_drawn == len(X)


def test_a_callable_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return F.cross_entropy(output, target)

    with pytest.raises(UsageError, match="parallelize cannot send loss_fn, a function, to the worker processes"):
        start(2, loss_fn)


def test_an_error_that_ends_its_own_sentence_is_not_ended_twice() -> None:
    with pytest.raises(WorkerError, match=r"failed during .*: IndexError: Target 9 is out of bounds\. All other ranks"):
        start(2, F.cross_entropy).forward_backward(X, torch.full_like(Y, 9))


def test_an_argument_that_a_worker_cannot_read_is_a_failure() -> None:
    pm = start(2, lambda output, target: F.cross_entropy(output, target["y"]))
    pids = workers()
    with pytest.raises(WorkerError, match=r"Rank 1 \(stage 1\) failed during forward_backward: FileNotFoundError"):
        pm.forward_backward(X, {"y": Y, "unreadable": Unreadable()})
    assert not any(map(alive, pids.values()))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            threading.Lock,
            r"failed during forward_backward in action 1F0: TypeError: cannot pickle '_thread.lock' object",
        ),
        (Unreadable, r"failed during forward_backward: its reply cannot be read: FileNotFoundError"),
    ],
)
def test_a_reply_that_cannot_travel_is_a_failure(make: Callable[[], Any], expected: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise UsageError(make())

    pm = start(2, loss_fn)
    with pytest.raises(WorkerError, match=rf"Rank 1 \(stage 1\) {expected}"):
        pm.forward_backward(X, Y)


def test_an_optimizer_that_cannot_be_made_fails_the_start() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise LookupError("no optimizer of that name")

    with pytest.raises(UsageError, match=r"optimizer=optimizer failed .* LookupError: no optimizer of that name"):
        start(2, F.cross_entropy, optimizer=optimizer)
    assert not workers(os.getpid())


# -- a model in this process ------------------------------------------------------------------------------------------

SGD = functools.partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("name", ["forward_backward", "train_step"])
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_a_model_in_this_process_is_closed_by_an_exception(name: str, kind: type[BaseException]) -> None:
    """The first microbatch has left gradients, buffers and random numbers behind, so nothing may go on from there."""
    losses = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses.append(F.cross_entropy(output, target))
        if len(losses) == 2:
            raise kind("no loss today")
        return losses[-1]

    pm = start(1, loss_fn, optimizer=SGD)
    with pytest.raises(kind, match="no loss today"):
        getattr(pm, name)(X, Y)
    calls: list[Callable[[], Any]] = [
        lambda: pm.forward_backward(X, Y), lambda: pm.train_step(X, Y), lambda: pm(X), lambda: pm.measure_memory(X, Y),
        pm.optimizer_step, pm.zero_grad, pm.state_dict, pm.gradients, lambda: pm.load_state_dict(mlp().state_dict()),
        lambda: pm.save_checkpoint("never"), lambda: pm.load_checkpoint("never"),
    ]  # fmt: skip
    for after_close in (False, True):
        for call in calls:
            with pytest.raises(
                UsageError, match=rf"was closed: {kind.__name__} during {name}\. Call autopar\.parallelize again"
            ):
                call()
        pm.close()
        assert after_close or pm.num_updates == 0
    assert len(losses) == 2


def test_an_exception_of_the_optimizer_closes_the_model() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise ArithmeticError("no update today")

    pm = start(1, F.cross_entropy, optimizer=functools.partial(Failing, lr=0.1))
    pm.forward_backward(X, Y)
    with pytest.raises(ArithmeticError):
        pm.optimizer_step()
    with pytest.raises(UsageError, match="was closed: ArithmeticError during optimizer_step"):
        pm.state_dict()


def test_what_is_refused_before_it_runs_changes_nothing() -> None:
    torch.manual_seed(0)
    model, plan = mlp(), plan_by_hand(mlp(), X, 3, [])
    one, other = (autopar.parallelize(model, 1, X, loss_fn=F.cross_entropy, optimizer=SGD, plan=plan) for _ in range(2))
    for x, y in ((X.to("meta"), Y), (X, Y[:3]), (X.double(), Y)):
        with pytest.raises(UsageError):
            one.forward_backward(x, y)
        assert one.num_drawn == 0
    results = [pm.train_step(X, Y) for pm in (one, other)]
    assert results[0].loss == results[1].loss and results[0].grad_norm == results[1].grad_norm


SCRIPT = """
import sys, time, torch, autopar
from torch import nn
from support import traces; traces.share()

mode = sys.argv[1]
model, x, y = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 8), torch.randint(0, 4, (6,))

def loss_fn(output, target):
    if mode == "sleep":
        print("reached", flush=True)
        time.sleep(60)
    return nn.functional.cross_entropy(output, target)

pm = autopar.parallelize(model, 2, x, loss_fn=loss_fn, microbatches=3, pp=2, pins={"2.linear": 1})
pm.forward_backward(x, y)
print("reached", flush=True)

"""


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        pytest.param("sleep", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.full),  # Ctrl-C in mid-step
        pytest.param("sleep", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.full),
        ("leave", None, 0),  # the interpreter exits without close()
    ],
)
def test_the_caller_goes_and_takes_its_workers_with_it(mode: str, number: Any, code: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "AUTOPAR_QUIET": "1"}
    command = [sys.executable, "script.py", mode]
    script = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started: dict[int, int] = {}
    while len(started) < 2 and script.poll() is None:
        started |= workers(script.pid)
        time.sleep(0.02)
    assert script.stdout is not None and script.stdout.readline() == "reached\n", script.communicate()[1]
    if number is not None:
        script.send_signal(number)
    _, errors = script.communicate(timeout=60)
    wait_for(lambda: not any(map(alive, started.values())), FAULT_SECONDS)
    assert script.returncode == code, errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert number is not None or errors == ""
