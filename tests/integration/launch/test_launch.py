"""How processes come to be ranks: two nodes of torchrun, srun, batch scripts; and how a fault reaches all nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.effort import full
from support.faults import free_port
from support.forks import forked

from autopar import UsageError, WorkerError
from autopar.cost.hardware.load import load_hardware
from autopar.runtime.launch.devices import Machine, rank_threads, this_machine
from autopar.runtime.launch.environment import Launched, launched, launcher_store
from autopar.runtime.launch.failure_watch import FailureWatcher

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_ADDR": "node0"}
NODES = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "4711"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces what launchers say by what the test says."""
    for name in os.environ:
        if name.startswith(("SLURM_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)

    def setenv(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return setenv


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launched(1, 2, 1, 2)),
        (TORCHRUN, Launched(1, 4, 0, 1, 2)),  # the other node has three
        (SLURM, Launched(3, 4, 1, 4, 1, "srun", "tcp://node0:29500")),
        (SLURM | {"MASTER_PORT": "1234"}, Launched(3, 4, 1, 4, 1, "srun", "tcp://node0:1234")),
        (SLURM | NODES, Launched(3, 4, 1, 2, 2, "srun", "tcp://node0:30211")),
        (SLURM | NODES | STEP | {"SLURM_NTASKS": "9"}, Launched(3, 4, 1, 2, 2, "srun", "tcp://node0:30211")),
        (SLURM | NODES | STEP | {"SLURM_STEP_ID": "2"}, Launched(3, 4, 1, 2, 2, "srun", "tcp://node0:29873")),
        (SLURM | TORCHRUN, Launched(1, 4, 0, 1, 2)),  # torchrun inside srun
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (BATCH, None),  # python in a batch script
        (BATCH | {"SLURM_STEP_ID": "4294967291"}, None),
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"}, None),  # salloc's shell
        (BATCH | STEP | {"MASTER_ADDR": "a"}, Launched(0, 4, 0, 2, 2, "srun", "tcp://a:30211")),  # srun in it
    ],
)
def test_what_the_environment_says(environ: Any, variables: dict[str, str], expected: Launched | None) -> None:
    environ(variables)
    assert launched() == expected


def test_devices_per_node_is_the_same_on_every_rank() -> None:
    assert [Launched(0, 4, 0, local, 2).devices_per_node for local in (3, 1)] == [2, 2]


def test_srun_without_a_meeting_point(environ: Any) -> None:
    environ(BATCH | STEP)
    with pytest.raises(UsageError, match=r"srun started 4 tasks, but MASTER_ADDR .*: export MASTER_ADDR=\$\(scontrol"):
        this_machine(4)


@pytest.mark.parametrize(("rank", "world"), [("", "2"), ("2", "2"), ("-1", "2"), ("0", "two")])
def test_variables_of_torchrun_that_no_launcher_has_set(environ: Any, rank: str, world: str) -> None:
    environ({"RANK": rank, "WORLD_SIZE": world})
    with pytest.raises(UsageError, match=f"RANK='{rank}' and WORLD_SIZE='{world}' are not those of .*Unset them"):
        this_machine(2)


def test_another_number_of_tasks(environ: Any) -> None:
    environ(SLURM)
    with pytest.raises(UsageError, match=r"devices=3, but srun started 4 .* devices=4 or --ntasks 3\."):
        this_machine(3)


def test_a_batch_script_is_told_of_the_nodes_that_it_does_not_use(environ: Any) -> None:
    environ(BATCH)
    with pytest.warns(UserWarning, match=r"All 4 devices are on the first of this job's 2 nodes\. .*`srun python …`"):
        assert this_machine(4, "gloo").launched is None


def test_a_plan_knows_the_nodes(environ: Any) -> None:
    environ(SLURM | NODES)
    machine, node = this_machine(4, "gloo"), load_hardware("h200-nvlink")
    here = machine.described(node)
    assert (machine.local_devices(4), here.devices_per_node, here.network) == (2, 2, node.network)
    assert node.link is not None
    assert here.transfer_seconds(0, 0, 1) == node.link.latency_seconds
    cpu = load_hardware("cpu-generic")
    with pytest.warns(UserWarning, match="cpu-generic has no network: links between the 2 nodes are priced like"):
        here = machine.described(cpu)
    assert cpu.link is not None and cpu.collective is not None
    assert here.transfer_seconds(0, 0, 2) == max(cpu.link.latency_seconds, cpu.collective.latency_seconds)
    assert Machine("gloo", "cpu", 1, None).described(cpu) is cpu


@pytest.mark.parametrize(
    ("launch", "variables", "own", "threads"),
    [
        (None, {}, 1, 4),
        (Launched(0, 2, 0, 2), {}, 8, 4),
        (Launched(0, 2, 0, 2), {}, 1, 1),  # the caller has chosen fewer
        (Launched(0, 2, 0, 2), {"OMP_NUM_THREADS": "6"}, 6, 6),
    ],
)
def test_threads_of_a_rank(
    environ: Any, monkeypatch: pytest.MonkeyPatch, launch: Launched | None, variables: Any, own: int, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environ(variables)
    monkeypatch.setattr("autopar.runtime.launch.devices.num_processors", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    assert rank_threads(2, launch) == threads


def test_gpus_of_a_rank(environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    environ(SLURM | NODES)
    for gpus, device in ((2, "cuda:1"), (1, "cuda:0")):  # one: srun shows each task its own
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert this_machine(4).device_of(3) == device
    environ({"SLURM_LOCALID": "3", "SLURM_NNODES": "1"})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"Rank 3 is number 3 of its node's .*the node has 2 GPUs. Start 2 processes"):
        this_machine(4)


TRAIN = """
import os, signal, sys, time
import torch
from torch import nn
import autopar
from autopar.runtime.launch.environment import launched
from support import traces; traces.share()

mode, pp, dp, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
launch = launched()
if mode == "raise in own group":
    where = {"init_method": "file://" + os.path.abspath("group"), "rank": launch.rank, "world_size": launch.world}
    torch.distributed.init_process_group("gloo", **where)
    mode = "raise"
print(f"rank {launch.rank} of {launch.world}, number {launch.local_rank} of {launch.local_world}", flush=True)

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

def loss_fn(output, target):
    if launch.rank == launch.world - 1:
        if mode == "raise":
            raise ArithmeticError("no loss today")
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "raise":
        time.sleep(600)  # as long as a lost peer would be waited for
    return nn.functional.cross_entropy(output, target)

torch.manual_seed(1)
x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
alone = model()
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
optimizer = sgd(alone.parameters())
with autopar.parallelize(
    model(), launch.world, x, loss_fn=loss_fn, optimizer=sgd, pp=pp, dp=dp, microbatches=2, balance="uniform",
    backend=backend,
) as pm:
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(alone(x), y)
        loss.backward()
        optimizer.step()
        own = [t.chunk(pm.data_size)[pm.data_rank] for t in (x, y)]
        assert abs(pm.train_step(*own).loss - loss.item()) < 1e-5
    for name, tensor in pm.state_dict().items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], rtol=1e-4, atol=1e-5)
print(f"rank {launch.rank} agrees with {torch.get_num_threads()} thread", flush=True)
"""


def started(
    folder: Path, commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]], script: str = TRAIN
) -> list[Any]:
    """Output and exit code of processes that run at the same time."""
    (folder / "script.py").write_text(script)
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_"))}
    quiet["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    running = [
        subprocess.Popen(
            command, cwd=folder, env=quiet | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        return [
            subprocess.CompletedProcess(process.args, process.wait(), out, errors)
            for process in running
            for out, errors in [process.communicate(timeout=240)]
        ]
    finally:
        for process in running:
            process.kill()


def two_launchers(folder: Path, processes: int, rendezvous: Sequence[str], *arguments: str) -> list[Any]:
    """Two launchers of torchrun, as on two nodes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", f"--nproc-per-node={processes}"]
    commands = [
        [
            *launcher,
            "--node-rank",
            str(node),
            *rendezvous,
            "script.py",
            *arguments,
            "gloo",
        ]  # c10d counts nodes by itself
        for node in range(2)
    ]
    return started(folder, commands, [{}, {}])


def in_a_fork(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Result of a script in a process that has imported torch."""
    (folder / "script.py").write_text(script)
    return forked(folder / "script.py", arguments, [{}], folder)


def c10d() -> list[str]:
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two-nodes"]


def said(done: Sequence[Any]) -> str:
    return "\n".join(run.stdout + run.stderr for run in done)


@pytest.mark.full
@pytest.mark.parametrize(("processes", "pp", "dp"), [(1, 2, 1), (2, 2, 2)])
def test_two_nodes_of_torchrun_have_the_loss_of_one_device(tmp_path: Path, processes: int, pp: int, dp: int) -> None:
    done = two_launchers(tmp_path, processes, c10d(), "train", str(pp), str(dp))
    assert [run.returncode for run in done] == [0, 0], said(done)
    agreeing = sorted(int(rank) for rank in re.findall(r"rank (\d) agrees", said(done)))
    assert agreeing == list(range(2 * processes)), said(done)
    for run in done:  # each node has local ranks of its own
        local = sorted(int(number) for number in re.findall(r"number (\d) of", run.stdout))
        assert local == list(range(processes)), said(done)


@pytest.mark.full
def test_a_fault_on_one_node_ends_the_other_with_the_cause(tmp_path: Path) -> None:
    static = [f"--master-port={free_port()}"]
    done = two_launchers(tmp_path, 1, static, "raise", "1", "2")
    assert all(run.returncode for run in done), said(done)
    assert "ArithmeticError: no loss today" in done[1].stderr, said(done)
    cause = "rank 1 (replica 1) failed during train_step: ArithmeticError: no loss today"
    assert cause in done[0].stderr, said(done)  # in its own error, or where it was ended


@pytest.mark.full
def test_a_node_that_dies_ends_the_other(tmp_path: Path) -> None:
    done = two_launchers(tmp_path, 1, c10d(), "die", "2", "1")
    assert all(run.returncode for run in done), said(done)
    assert "exitcode: -9" in said(done), said(done)  # whether the other notices it or its launcher does, it is ended


def srun(folder: Path, *arguments: str, nodes: int = 2, backend: str = "gloo", script: str = TRAIN) -> list[Any]:
    """Two tasks, as srun would start them."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": str(nodes), "SLURM_NTASKS": "2"}
    step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    local = ["0", "0"] if nodes == 2 else ["0", "1"]
    variables = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": local[rank]} for rank in range(2)]
    return started(folder, [[sys.executable, "script.py", *arguments, backend]] * 2, variables, script)


def test_tasks_of_srun_have_the_loss_of_one_device(tmp_path: Path) -> None:
    done = srun(tmp_path, "train", "2", "1")
    assert [run.returncode for run in done] == [0, 0], said(done)
    assert "rank 0 of 2, number 0 of 1" in done[0].stdout and "rank 1 of 2, number 0 of 1" in done[1].stdout
    assert all("agrees" in run.stdout for run in done), said(done)


TOLD = """
import contextlib
import os
import random
from autopar.runtime.launch.environment import broadcast_from_rank0

rank = os.environ["SLURM_PROCID"]
for text in ("", "not here", ""):
    assert broadcast_from_rank0(text if rank == "0" else f"of rank {rank}") == text
print("heard", flush=True)
os._exit(0)  # rank 0 serves the store
"""


def test_tasks_hear_what_the_first_one_says_before_it_ends(tmp_path: Path) -> None:
    done = srun(tmp_path, script=TOLD)
    assert [(run.returncode, run.stdout) for run in done] == [(0, "heard\n")] * 2, said(done)


@pytest.mark.full
def test_a_waiting_task_is_told_why_its_peer_is_gone(tmp_path: Path) -> None:
    done = srun(tmp_path, "raise", "2", "1")
    assert all(run.returncode for run in done), said(done)
    assert "ArithmeticError: no loss today" in done[1].stderr, said(done)
    cause = "rank 1 (stage 1) failed during train_step: ArithmeticError: no loss today"
    assert cause in done[0].stderr, said(done)  # in its own error, or where it was ended


@pytest.mark.full
def test_a_failure_is_heard_in_a_process_group_of_the_caller(tmp_path: Path) -> None:
    done = srun(tmp_path, "raise in own group", "1", "2")
    assert all(run.returncode for run in done), said(done)
    cause = "was ended, because rank 1 (replica 1) failed during train_step: ArithmeticError: no loss today"
    assert cause in done[0].stderr, said(done)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tasks_of_srun_on_gpus(tmp_path: Path) -> None:
    done = srun(tmp_path, "train", "2", "1", nodes=1, backend="nccl")
    assert [run.returncode for run in done] == [0, 0], said(done)
    done = srun(tmp_path, "raise", "2", "1", nodes=1, backend="nccl")  # the other one waits in a kernel
    assert all(run.returncode for run in done), said(done)
    assert "rank 1 (stage 1) failed during train_step: ArithmeticError: no loss today" in done[0].stderr, said(done)


def test_a_task_that_waits_for_others_in_vain(environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environ(SLURM | {"SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    monkeypatch.setattr("autopar.runtime.launch.environment.START_SECONDS", 1.0)
    launch = launched()
    assert launch is not None
    with pytest.raises(
        UsageError, match=r"Rank 0 did not meet the other 3 that srun started, at 127.0.0.1:\d+ within 1"
    ):
        launcher_store(launch)


def test_a_rank_whose_torchrun_has_ended(environ: Any) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ(variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    launch = launched()
    assert launch is not None
    with pytest.raises(WorkerError, match=r"Rank 1 cannot reach 127.0.0.1:\d+, .* has ended\. Start the run again"):
        launcher_store(launch)


def test_ranks_that_are_started_again_see_no_key_of_the_last_attempt(environ: Any) -> None:
    agent = store()  # torchrun's, which outlives the attempts
    environ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    ranks = [Launched(rank, 2, rank, 2, address=f"tcp://127.0.0.1:{agent.port}") for rank in range(2)]
    for attempt in range(2):
        launcher_store.cache_clear()  # as in new processes
        with ThreadPoolExecutor() as threads:
            first, second = threads.map(launcher_store, ranks)
        assert not first.check(["failed/0"])
        second.set("failed/0", f"rank 1 failed in attempt {attempt}")
        assert first.get("failed/0") == second.get("failed/0")


LEAVING = """
import atexit, sys, threading, time
from types import SimpleNamespace
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.runtime.launch.spmd import SpmdBackend

class Stub(SimpleNamespace):
    'Which can be referred to weakly.'

atexit.register(time.sleep, float(sys.argv[2]))  # registered before: what Python waits for while it ends
ranks = object.__new__(SpmdBackend)
ranks.alarm, ranks.lock = None, threading.RLock()
spec = Stub(rank=0, placement=Placement(2))
ranks.rank = Stub(is_busy=lambda: sys.argv[1] == "busy", mesh=Mesh(2, 1, 1), spec=spec)
with ranks.report_failures("train_step"):
    raise ArithmeticError("no loss today")
"""


@pytest.mark.parametrize(("gpu", "python_waits"), [("busy", 100.0), ("done", 0.1)])
def test_a_failed_rank_leaves_a_gpu_that_waits_for_another(gpu: str, python_waits: float, tmp_path: Path) -> None:
    done = in_a_fork(tmp_path, LEAVING, gpu, str(python_waits))
    assert done.returncode == 1 and "ArithmeticError: no loss today" in done.stderr
    said = "autopar: rank 0 (stage 0) leaves a GPU that waits for another rank" in done.stderr
    assert said == (gpu == "busy")


# -- the alarm ---------------------------------------------------------------------------------------------------------


def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_failure_is_heard_while_another_thread_waits_for_a_key() -> None:
    served = store()
    own = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    alarm = FailureWatcher(own, "failed/0", "rank 1", lambda: False)
    waiting = threading.Thread(target=own.get, args=["late"])
    waiting.start()
    try:
        served.set("failed/0", "rank 0 failed")
        assert alarm.poll_failure(60) == "rank 0 failed"
        assert waiting.is_alive()
    finally:
        served.set("late", "")
        waiting.join()
        alarm.close()


HEARING = """
import sys, time
import torch.distributed as dist
from autopar.runtime.launch import failure_watch as alarm

alarm.POLL_SECONDS, alarm.GRACE_SECONDS, alarm.PATIENT_SECONDS = 0.05, 0.2, float(sys.argv[2])
alarm.CONNECT_SECONDS = 0.1
served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", served.port, is_master=False)
own = alarm.FailureWatcher(client, "failed/0", "rank 1", lambda: False)
if sys.argv[1] == "gone":
    del served
else:
    try:
        with own.report_failures("train_step"):
            raise ArithmeticError("no loss today")
    except ArithmeticError:
        pass
with own.report_failures("close"):
    time.sleep(30 if float(sys.argv[2]) < 1 else 1.5)
print("closed")
"""


@pytest.mark.parametrize(
    ("event", "patience", "said"),
    [
        ("gone", 0.5, "rank 1 was ended, because the process of the ranks' store is gone (rank 0 or the launcher)"),
        ("gone", 60.0, None),
        ("own failure", 0.5, "rank 1 was ended, because rank 1 failed during train_step: ArithmeticError"),
        ("own failure", 60.0, None),
    ],
)
def test_a_rank_may_close_after_its_own_failure_and_the_end_of_the_store(
    event: str, patience: float, said: str | None, tmp_path: Path
) -> None:
    done = in_a_fork(tmp_path, HEARING, event, str(patience))
    assert (done.returncode, "closed" in done.stdout) == ((1, False) if said else (0, True)), done.stderr
    assert said is None or said in done.stderr
    assert len(done.stderr.splitlines()) < 200  # torch tells each lost connection at length


UNCLOSED = """
import torch.distributed as dist
from autopar.runtime.launch import failure_watch as alarm

alarm.POLL_SECONDS = 0.0  # nearly always in the store, whose threads outlive Python's
served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
alarms = [alarm.FailureWatcher(served, "failed/0", "rank 0", lambda: False) for _ in range(4)]
"""


def test_a_process_that_does_not_close_its_alarm_ends_as_any_other() -> None:
    command, number = [sys.executable, "-c", UNCLOSED], 3 if full() else 1
    done = [subprocess.run(command, capture_output=True, text=True, timeout=60) for _ in range(number)]
    assert [(run.returncode, run.stderr) for run in done] == [(0, "")] * number
