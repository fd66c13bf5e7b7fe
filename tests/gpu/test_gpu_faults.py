"""Steps on GPUs that nobody waits for, and faults in the middle of them. Skips itself where there are fewer than two.

Every fault has to end all ranks within `FAULT_SECONDS`, although the others wait inside of an NCCL kernel.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.faults import free_port, workers
from support.models import tiny_vit

import autopar
from autopar import DeviceMemoryError, NonFiniteLossWarning, WorkerError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
FAULT_SECONDS = 15.0
torch.manual_seed(0)
X, Y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
PLAIN: dict[str, Any] = {"compile": False, "cuda_graph": False}
MESHES = [{"pp": 2}, {"tp": 2}, {"dp": 2}]
ASKED = [json.dumps(mesh) for mesh in MESHES]


def start(devices: int = 2, loss_fn: Any = F.cross_entropy, **options: Any) -> autopar.ParallelModel:
    return autopar.parallelize(tiny_vit(), devices, X, loss_fn=loss_fn, optimizer=ADAMW, microbatches=4, **options)


# -- nobody waits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"cuda_graph": True}], ids=["plain", "graph"])
def test_a_step_has_the_host_wait_for_nothing(options: dict[str, Any]) -> None:
    x, y = X.cuda(), Y.cuda()  # of a batch on the CPU it awaits the copy, but not what computes
    with start(1, **options) as pm:
        for _ in range(5):
            pm.train_step(x, y)
        torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
        try:
            results = [pm.train_step(x, y) for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [result.ready for result in results] == [True, False, False]
        assert all(0 < result.step_seconds < 10 and result.grad_norm for result in results)


@pytest.mark.parametrize("mesh", effort.only(MESHES[:1], [{}, *MESHES]), ids=str)
@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"cuda_graph": True}], ids=["plain", "graph"])
def test_inputs_may_be_written_over_as_soon_as_a_call_returns(mesh: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    batches = [torch.randn_like(X) for _ in range(6)]
    found = []
    for read_at_once in (True, False):
        torch.manual_seed(0)
        with start(2 if mesh else 1, **mesh, **options) as pm:
            buffer, results = X.pin_memory(), []
            for batch in batches:
                buffer.copy_(batch)
                results.append(pm.train_step(buffer, Y))
                if read_at_once:
                    assert results[-1].loss > 0
                buffer.fill_(torch.nan)
            found.append([result.loss for result in results])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_loss_that_is_not_finite_warns_when_it_is_read() -> None:
    with start(**PLAIN) as pm:
        result = pm.train_step(X * torch.inf, Y)
        with pytest.warns(NonFiniteLossWarning, match="loss of step 0 is nan"):
            assert result.loss != result.loss


# -- faults in worker processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", effort.only([0], [0, 1]))
@pytest.mark.parametrize("mesh", effort.only(MESHES[:1], MESHES), ids=str)
@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"cuda_graph": True}], ids=["plain", "graph"])
def test_a_rank_killed_between_steps_ends_all(victim: int, mesh: dict[str, int], options: dict[str, Any]) -> None:
    pm = start(**mesh, **options)
    assert pm.train_step(X, Y).loss > 0
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(workers()[victim], signal.SIGKILL)

    threading.Timer(3.0, kill).start()
    with pytest.raises(WorkerError, match=rf"^Rank {victim} .* died during train_step.*: killed by SIGKILL"):
        while True:
            pm.train_step(X, Y)  # nobody reads the numbers
    assert time.monotonic() - killed[0] < FAULT_SECONDS
    assert not workers()


@pytest.mark.parametrize("mesh", effort.only(MESHES[1:2], MESHES), ids=str)
def test_a_rank_that_really_runs_out_of_memory_is_named(mesh: dict[str, int]) -> None:
    def greedy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if (target < 0).any():
            torch.cuda.set_per_process_memory_fraction(0.05)
            output = output + output.new_zeros(2**36).sum()  # 256 GiB
        return F.cross_entropy(output, target.abs())

    pm = start(loss_fn=greedy, **mesh, **PLAIN)
    assert pm.train_step(X, Y).loss > 0
    begun = time.monotonic()
    with pytest.raises(
        DeviceMemoryError,
        match=r"^Rank \d .* ran out of memory during train_step in action \dF0, with .* to .* on cuda:\d: CUDA out of "
        r"memory.*Its peak was .*iB of .*GiB; the plan predicted .*iB\. Use more microbatches",
    ):
        pm.train_step(X, -Y - 1)
    assert time.monotonic() - begun < FAULT_SECONDS
    assert not workers()


# -- faults under a launcher -------------------------------------------------------------------------------------------

SCRIPT = """
import functools, json, os, signal, sys, time
import torch
import torch.nn.functional as F
from support.models import tiny_vit
import autopar

mode, mesh = sys.argv[1], json.loads(sys.argv[2])
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID")))
step = 0

def loss_fn(output, target):
    if step == 10 and rank == 1 and mode in ("raise", "memory"):
        print("fault", time.time(), flush=True)
        if mode == "raise":
            raise ArithmeticError("no loss today")
        output = output + output.new_zeros(2**40).sum()
    return F.cross_entropy(output, target)

torch.manual_seed(0)
x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
pm = autopar.parallelize(
    tiny_vit(), 2, x, loss_fn=loss_fn, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3), microbatches=4,
    compile=False, cuda_graph=False, **mesh,
)
own = [t.chunk(pm.data_size)[pm.data_rank] for t in (x, y)]
for step in range(10):
    pm.train_step(*own)
step = 10
if rank == 1 and mode == "die":
    print("fault", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
result = pm.train_step(*own)
torch.cuda.synchronize()  # in no call of the model: waits for a peer that is gone
result.loss
print("went on", flush=True)
"""


def seconds_to_the_end(folder: Path, mode: str, mesh: str, launcher: str) -> tuple[float, str]:
    """How long after the fault all processes had ended, and what they said."""
    (folder / "script.py").write_text(SCRIPT)
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    quiet |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    commands = [[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]]
    variables: list[dict[str, str]] = [{}]
    if launcher == "srun":
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS": "2"}
        step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        commands = [[sys.executable]] * 2
        variables = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    running = [
        subprocess.Popen(
            [*command, "script.py", mode, mesh], cwd=folder, env=quiet | own,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command, own in zip(commands, variables, strict=True)
    ]  # fmt: skip
    try:
        said = "".join(process.communicate(timeout=240)[0] for process in running)
    finally:
        for process in running:
            process.kill()
    ended = time.time()
    assert all(process.returncode for process in running) and "went on" not in said, said
    return ended - float(said.split("fault ")[1].split()[0]), said


@pytest.mark.parametrize("mesh", effort.only(ASKED[2:], ASKED))
def test_a_killed_rank_ends_those_that_wait_in_a_kernel(tmp_path: Path, mesh: str) -> None:
    seconds, said = seconds_to_the_end(tmp_path, "die", mesh, "torchrun")
    assert seconds < FAULT_SECONDS, said


@pytest.mark.parametrize("mesh", effort.only(ASKED[2:], ASKED))
def test_a_rank_that_waits_for_its_gpu_is_ended_with_the_cause(tmp_path: Path, mesh: str) -> None:
    """srun ends nobody, so the ranks have to end each other."""
    seconds, said = seconds_to_the_end(tmp_path, "raise", mesh, "srun")
    assert seconds < FAULT_SECONDS + 5, said  # Python itself takes a few seconds to leave
    assert "failed during train_step: ArithmeticError: no loss today" in said, said


def test_out_of_memory_under_a_launcher(tmp_path: Path) -> None:
    seconds, said = seconds_to_the_end(tmp_path, "memory", '{"pp": 2, "schedule": "1f1b"}', "torchrun")
    assert seconds < FAULT_SECONDS, said
    assert "DeviceMemoryError: Rank 1 (stage 1) ran out of memory during train_step in action 1F0, with" in said, said
