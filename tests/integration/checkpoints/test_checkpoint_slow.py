"""A save, load or copy that takes longer than a step may take does not end the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_models import ADAMW, CLASSES, ROWS, small
from support.forks import run_on_two

from autopar import WorkerError
from autopar.runtime.engine.metrics import StepLimit
from autopar.runtime.launch.pool import WorkerPool


def test_workers_are_waited_for_as_long_as_a_command_may_take() -> None:
    pool = WorkerPool.__new__(WorkerPool)
    pool.limit, pool.checkpoint_seconds = StepLimit(600.0), 3600.0
    named = ["train_step", "read", "save_checkpoint", "inspect_checkpoint", "load_checkpoint"]
    assert [pool.seconds(name) for name in named] == [600, 600, 3600, 3600, 3600]


def slow_writer(caller: int, seconds: float) -> Any:
    """Optimizer callable after which rank 1's save takes so long."""

    def make(params: Any) -> torch.optim.Optimizer:
        if os.getpid() != caller and any(p.shape == (4, 16) for p in params):
            from autopar.runtime.checkpoint.reshard_planners import PartsSavePlanner

            look_up = PartsSavePlanner.lookup_object

            def slowly(self: Any, index: Any) -> torch.Tensor:
                if index.fqn == "model.2.weight":
                    time.sleep(seconds)
                return look_up(self, index)

            PartsSavePlanner.lookup_object = slowly
        return ADAMW(params)

    return make


@pytest.mark.full
def test_a_save_takes_longer_than_a_step_may(tmp_path: Path) -> None:
    make = slow_writer(os.getpid(), 6.0)
    options = {"devices": 2, "pp": 2, "microbatches": 2, "optimizer": make, "timeout": 4.0}
    with small(**options) as pm:
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(tmp_path)
        pm.load_checkpoint(tmp_path)
        pm.train_step(ROWS, CLASSES)
    with small(**options, checkpoint_timeout=2.0) as pm, pytest.raises(WorkerError, match="save_checkpoint"):
        pm.save_checkpoint(tmp_path)


SLOW = """
import os, time
from pathlib import Path
import torch
from torch import nn
import autopar
from autopar.runtime.checkpoint import save_load
from autopar.train import Checkpoints, Trainer, callbacks

torch.set_num_threads(1)
rank = int(os.environ["RANK"])


def slow(act):
    def slowly(*arguments):
        time.sleep(6.0 if rank == 0 else 0.0)
        return act(*arguments)

    return slowly


callbacks.copy_checkpoint = slow(callbacks.copy_checkpoint)
save_load.inspect = slow(save_load.inspect)
batches = torch.utils.data.DataLoader([(torch.randn(3), 1)] * 8, batch_size=4)
model, sgd = nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
with autopar.parallelize(model, 2, torch.empty(8, 3), optimizer=sgd, dp=2, timeout=4.0) as pm:
    Trainer(pm, batches, batches, epochs=1, callbacks=(Checkpoints(Path("old")),)).fit()
    on = Trainer(pm, batches, batches, epochs=2, callbacks=(Checkpoints(Path("new")),))
    on.resume(Path("old") / "last")
    on.fit()
assert (Path("new") / "best" / "checkpoint.json").exists()
print(f"rank {rank} agrees", flush=True)
"""


@pytest.mark.full
def test_under_torchrun_a_rank_may_check_and_copy_for_longer_than_a_step(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, SLOW)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2
