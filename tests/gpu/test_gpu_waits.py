"""Waits for a GPU that does not finish, and pools on GPUs that several threads read."""

from __future__ import annotations

import functools
import os
import queue
import threading
from typing import Any

import psutil
import pytest
import torch
from support.faults import workers
from support.models import tiny_vit

import autopar
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.engine.metrics import StepLimit, step_numbers
from autopar.runtime.engine.timer import Stopwatch
from autopar.runtime.spec import StepNumbers
from autopar.schedule.actions import Action

pytestmark = pytest.mark.gpu
SLEEP_CYCLES = 1 << 34  # some seconds
FIRST, SECOND = Action("F", 0, 0), Action("F", 0, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graph", [False, True])
def test_a_step_that_hangs_says_where_its_gpu_is(graph: bool) -> None:
    device = torch.device("cuda", 0)
    stopwatch, stream = Stopwatch(device), torch.cuda.Stream(device)
    losses, cycles = torch.ones(2, device=device), torch.zeros(1, device=device)

    def actions(slow: bool) -> list[tuple[Action, object, object]]:
        marks = []
        for action in (FIRST, SECOND):
            start = stopwatch.mark()
            cycles.add_(1)
            if slow and action == SECOND:
                torch.cuda._sleep(SLEEP_CYCLES)
            marks.append((action, start, stopwatch.mark()))
        return marks

    with torch.cuda.stream(stream):
        captured = torch.cuda.CUDAGraph()
        if graph:
            actions(False)
            with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
                marks = actions(True)
        for _ in range(2):  # the second replay finds the events of the first
            start = stopwatch.mark()
            if graph:
                captured.replay()
            else:
                marks = actions(True)
            numbers = step_numbers(losses, None, start, stopwatch, marks, StepLimit(0.5))
            assert callable(numbers)
            with pytest.raises(TransportError, match=r"within 0\.\d s: it has finished 0F0 and is in 0F1"):
                numbers()
            torch.cuda.synchronize(device)
            read = numbers()
            assert isinstance(read, StepNumbers) and read.losses == [1.0, 1.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_pool_listens_on_the_loopback_interface_and_another_thread_reads_its_results(mesh: dict[str, Any]) -> None:
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    results: queue.Queue[autopar.StepResult | None] = queue.Queue()
    read: list[float] = []

    def log() -> None:
        while (result := results.get()) is not None:
            read.append(result.loss)

    with autopar.parallelize(tiny_vit(), 2, x, optimizer=adamw, microbatches=4, **mesh) as pm:
        logging = threading.Thread(target=log, daemon=True)
        logging.start()
        for _ in range(100):
            results.put(pm.train_step(x, y))
        results.put(None)
        logging.join()
        processes = {os.getpid(), *workers().values()}
        sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in processes]
    assert len(read) == 100
    assert sockets and {str(next(iter(c.laddr))) for c in sockets} == {"127.0.0.1"}
