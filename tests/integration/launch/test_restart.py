"""torchrun starts failed ranks again: the next attempt trains on from the checkpoint of the last one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from support.faults import free_port
from support.forks import forked

SCRIPT = """
import functools, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import autopar
from autopar.runtime.launch import failure_watch

torch.set_num_threads(1)
failure_watch.GRACE_SECONDS, failure_watch.POLL_SECONDS = 0.3, 0.05
rank, fault = int(os.environ["RANK"]), sys.argv[1]
folder, failed = Path("checkpoint"), Path("failed")
again = failed.exists()

def loss_fn(output, target):
    if again:
        time.sleep(0.5)  # longer than a rank waits that has heard of a failure
    if rank == 1 and not again and pm.num_updates == 2:
        failed.touch()
        if fault == "raise":
            raise ArithmeticError("no loss today")
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, target)

torch.manual_seed(0)
x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
adam = functools.partial(torch.optim.Adam, lr=1e-2)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
run = dict(pp=2, microbatches=1, backend="gloo", compile=False)
with autopar.parallelize(model, 2, x, loss_fn=loss_fn, optimizer=adam, **run) as pm:
    if again:
        pm.load_checkpoint(folder)
    first = pm.num_updates
    while pm.num_updates < 4:
        pm.train_step(x, y)
        pm.save_checkpoint(folder)
print(f"rank {rank} went from {first} to {pm.num_updates}", flush=True)
"""


def torchrun(folder: Path, fault: str, nodes: Sequence[Sequence[str]]) -> str:
    """Output of one launcher for each list of its arguments; all must succeed."""
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2", *node, "script.py", fault],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in nodes
    ]  # fmt: skip
    try:
        output = "".join(launcher.communicate(timeout=200)[0] for launcher in launchers)
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0] * len(nodes), output
    return output


def check_both_went_on(output: str) -> None:
    assert all(f"rank {rank} went from 2 to 4" in output for rank in range(2)), output


@pytest.mark.full
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_ranks_that_find_the_store_of_an_earlier_attempt_go_on(tmp_path: Path, fault: str) -> None:
    """As under torchrun, whose store outlives the attempts, but quicker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [launcher | {"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    (tmp_path / "script.py").write_text(SCRIPT)
    first, second = (forked(tmp_path / "script.py", [fault], ranks, tmp_path) for _ in range(2))
    assert first.returncode
    assert second.returncode == 0, second.stderr
    check_both_went_on(second.stdout)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_ranks_that_torchrun_starts_again_go_on(tmp_path: Path, fault: str) -> None:
    check_both_went_on(torchrun(tmp_path, fault, [["--standalone", "--nproc-per-node=2"]]))


@pytest.mark.full
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_two_nodes_that_torchrun_starts_again_go_on(tmp_path: Path, fault: str) -> None:
    node = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    check_both_went_on(torchrun(tmp_path, fault, [node, node]))
