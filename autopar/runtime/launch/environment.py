"""Launcher of this process: torchrun or srun, which start several ranks, or none.

torchrun sets RANK, WORLD_SIZE and the address of the store. srun sets SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID; the
batch script has to set the address, in MASTER_ADDR. If both sets of variables are present, srun started torchrun, and
torchrun's variables count.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from autopar.errors import SEE_DOCTOR, UsageError, WorkerError
from autopar.runtime.launch.attempt import attempt_name

if TYPE_CHECKING:  # reading a launcher's variables needs no torch
    import torch.distributed as dist

START_SECONDS = 300.0  # time for all processes to import their modules
DEFAULT_PORT = 29500  # torch's default
PORTS = 1000  # range of ports, so that jobs and steps which share a node use different ones
STEP_PORTS = 331  # between the ports of a job's steps, since jobs that share a node often have consecutive numbers
RESERVED_STEPS = 0xFFFFFFF0  # first of the step ids that Slurm reserves: batch script, interactive shell, extern
TOLD = itertools.count()  # numbers the broadcasts, so that a later one does not read an earlier one's text
MASTER_REMEDY = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


@dataclass(frozen=True)
class Launched:
    """Place of this process among those of a launcher.

    ``address`` is the address of the store, as an argument of `torch.distributed.rendezvous`.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    num_nodes: int = 1
    launcher: str = "torchrun"
    address: str = "env://"

    @property
    def devices_per_node(self) -> int:
        """Number of ranks on the fullest node. It is equal on all ranks."""
        return -(-self.world // self.num_nodes)


def launched() -> Launched | None:
    """Launcher's description of this process, from the environment; None in a plain script or notebook.

    Raises:
        UsageError: srun started several processes and MASTER_ADDR is not set; or RANK is no number below WORLD_SIZE.
    """
    if "RANK" in os.environ:
        return by_torchrun(os.environ)
    return by_srun(os.environ)


def by_torchrun(environ: Mapping[str, str]) -> Launched | None:
    """Place of this process among those of torchrun, from torchrun's variables; None if there is only one.

    Raises:
        UsageError: RANK is no number below WORLD_SIZE.
    """
    variables = environ["RANK"], environ.get("WORLD_SIZE", "1")
    if variables[1] == "1":
        return None
    if not all(text.isdecimal() for text in variables) or int(variables[0]) >= int(variables[1]):
        raise UsageError(
            f"RANK={variables[0]!r} and WORLD_SIZE={variables[1]!r} are not those of a process of torchrun. Unset them "
            "to run without a launcher."
        )
    rank, world = map(int, variables)
    local_world = int(environ.get("LOCAL_WORLD_SIZE", world))
    nodes = int(environ.get("GROUP_WORLD_SIZE", -(-world // local_world)))
    return Launched(rank, world, int(environ.get("LOCAL_RANK", rank)), local_world, nodes)


def by_srun(environ: Mapping[str, str]) -> Launched | None:
    """Place of this process among the tasks of srun, from srun's variables; None if there is only one.

    Raises:
        UsageError: MASTER_ADDR is not set.
    """
    world = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))
    if world == 1 or "SLURM_PROCID" not in environ or starts_once(environ):
        return None
    if "MASTER_ADDR" not in environ:
        raise UsageError(
            f"srun started {world} tasks, but MASTER_ADDR does not say where they meet. "
            f"Put this before srun in the batch script: {MASTER_REMEDY}"
        )
    rank = int(environ["SLURM_PROCID"])
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = int(environ.get("MASTER_PORT", DEFAULT_PORT + (job + STEP_PORTS * step) % PORTS))
    return Launched(
        rank,
        world,
        int(environ.get("SLURM_LOCALID", rank)),
        -(-world // nodes),
        nodes,
        "srun",
        f"tcp://{environ['MASTER_ADDR']}:{port}",
    )


def starts_once(environ: Mapping[str, str]) -> bool:
    """Whether this is the batch script or interactive shell of a Slurm job, which runs once for any number of tasks.

    SLURM_PROCID and SLURM_NTASKS are as in srun's first task: 0 and the requested number. But only srun sets the id of
    an ordinary step.
    """
    step = environ.get("SLURM_STEP_ID")
    return environ["SLURM_PROCID"] == "0" and (
        "SLURM_JOB_ID" in environ if step is None else int(step) >= RESERVED_STEPS
    )


@functools.cache
def launcher_store(launch: Launched) -> dist.Store:
    """Store of the ranks that the launcher started together, without keys of an earlier attempt.

    Raises:
        UsageError: other ranks did not connect in time.
        WorkerError: torchrun's agent, which serves the store, has ended.
    """
    import torch.distributed as dist

    try:
        store = connected_store(launch)
        name = attempt_name(dist.PrefixStore("autopar", store), launch.rank, launch.world, START_SECONDS)
    except (dist.DistError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"Rank {launch.rank} did not meet the other {launch.world - 1} that {launch.launcher} started, at "
            f"{meeting_point(launch)} within {START_SECONDS:.0f} s: {reason}. Check that all of them run "
            "this script, that rank 0 is on that host, and that no other job uses the port (MASTER_PORT). To run "
            f"without a launcher, unset its variables, such as RANK. {SEE_DOCTOR}"
        ) from error
    return dist.PrefixStore(f"autopar/{name}", store)


@functools.cache
def connected_store(launch: Launched) -> dist.Store:
    """Store of the caller's process group, else that at the launcher's address.

    A process keeps it for its whole life, since it may be the server.

    Raises:
        UsageError: no variable says where the ranks meet.
        WorkerError: torchrun's agent, which serves the store, has ended.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # autopar makes a group only after this call
        assert dist.group.WORLD is not None
        return dist.group.WORLD.get_group_store()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if launch.address == "env://" and missing:
        raise UsageError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world} say that this is one of several processes, but "
            f"{missing[0]} does not say where they meet. Start them by torchrun, or set MASTER_ADDR and MASTER_PORT."
        )
    if launch.address == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent serves the store before it starts ranks. TCPStore would try a refused connection again and again.
        host, port = meeting_point(launch).rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), START_SECONDS).close()
        except ConnectionRefusedError as error:
            raise WorkerError(
                f"Rank {launch.rank} cannot reach {host}:{port}, where torchrun serves the store of its ranks: that "
                f"process has ended. Start the run again. {SEE_DOCTOR}"
            ) from error
    timeout = timedelta(seconds=START_SECONDS)
    store, _, _ = next(dist.rendezvous(launch.address, launch.rank, launch.world, timeout=timeout))
    return store


def broadcast_from_rank0(text: str) -> str:
    """Text that rank 0 passes, on all ranks of a launcher. All ranks make the call; no model is needed.

    Rank 0 returns once all ranks have the text: its process may end then, and the store ends with it.

    Raises:
        UsageError: other ranks did not connect in time.
    """
    launch = launched()
    if launch is None:
        return text
    import torch.distributed as dist

    store = dist.PrefixStore(f"told/{next(TOLD)}", launcher_store(launch))
    if launch.rank == 0:
        store.set("text", text)
        store.wait(["heard"])
        return text
    text = store.get("text").decode()
    if store.add("ranks", 1) == launch.world - 1:
        store.set("heard", "")
    return text


def meeting_point(launch: Launched) -> str:
    """Host and port of the store, as text for messages."""
    if launch.address == "env://":
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return launch.address.removeprefix("tcp://")
