"""Who started this process: a launcher that made it one of several ranks, or the user alone.

torchrun tells its processes RANK, WORLD_SIZE and where to meet. srun tells them SLURM_PROCID, SLURM_NTASKS and
SLURM_LOCALID; where to meet is the batch script's to say, in MASTER_ADDR. Where both are set, torchrun was started by
srun and its own count.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from autopar.errors import UsageError

START_SECONDS = 300.0  # for all processes to import what they need
DEFAULT_PORT = 29500  # torch's own
PORTS = 1000  # so many jobs that share a node have ports of their own
RESERVED_STEPS = 0xFFFFFFF0  # Slurm numbers its own steps from the top: batch script, interactive shell, extern
TOLD = itertools.count()  # numbers what was told, so that a later call does not take an earlier one's
MASTER_REMEDY = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


@dataclass(frozen=True)
class Launched:
    """What the launcher told this process.

    ``address`` is where the ranks meet, as `torch.distributed.rendezvous` takes it.
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
        """Ranks of the fullest node: the same number on all of them, as each rank plans for itself."""
        return -(-self.world // self.num_nodes)


def launched() -> Launched | None:
    """What the environment says of this process, or None in a plain script or notebook.

    Raises:
        UsageError: srun started several processes and MASTER_ADDR is not set.
    """
    if "RANK" in os.environ:
        return by_torchrun(os.environ)
    return by_srun(os.environ)


def by_torchrun(environ: Mapping[str, str]) -> Launched | None:
    """One of several processes of torchrun, from its variables."""
    rank, world = int(environ["RANK"]), int(environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    local_world = int(environ.get("LOCAL_WORLD_SIZE", world))
    nodes = int(environ.get("GROUP_WORLD_SIZE", -(-world // local_world)))
    return Launched(rank, world, int(environ.get("LOCAL_RANK", rank)), local_world, nodes)


def by_srun(environ: Mapping[str, str]) -> Launched | None:
    """One of several tasks of srun, from its variables.

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
    port = int(environ.get("MASTER_PORT", DEFAULT_PORT + int(environ.get("SLURM_JOB_ID", "0")) % PORTS))
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
    """Whether this is a batch script or interactive shell of a Slurm job, which runs once however many its tasks are.

    Its SLURM_PROCID is 0 and SLURM_NTASKS is what was asked for, as in srun's first task; but only srun numbers a step.
    """
    step = environ.get("SLURM_STEP_ID")
    return environ["SLURM_PROCID"] == "0" and (
        "SLURM_JOB_ID" in environ if step is None else int(step) >= RESERVED_STEPS
    )


@functools.cache
def launcher_store(launch: Launched) -> dist.Store:
    """The store where the ranks meet; one for the life of the process, as it may be a server.

    Raises:
        UsageError: the others did not come.
    """
    try:
        store, _, _ = next(
            dist.rendezvous(launch.address, launch.rank, launch.world, timeout=timedelta(seconds=START_SECONDS))
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"Rank {launch.rank} did not meet the other {launch.world - 1} that {launch.launcher} started, at "
            f"{meeting_point(launch)} within {START_SECONDS:.0f} s: {reason}. Check that all of them run "
            "this script, that rank 0 is on that host, and that no other job uses the port (MASTER_PORT)."
        ) from error
    return store


def broadcast_from_rank0(text: str) -> str:
    """What rank 0 passes here, on all ranks of a launcher, which make the call; needs no model.

    Rank 0 returns when all have it: it may end the process then, and with it the store where they meet.

    Raises:
        UsageError: the others did not come.
    """
    launch = launched()
    if launch is None:
        return text
    store = dist.PrefixStore(f"autopar/told/{next(TOLD)}", launcher_store(launch))
    if launch.rank == 0:
        store.set("text", text)
        store.wait(["heard"])
        return text
    text = store.get("text").decode()
    if store.add("ranks", 1) == launch.world - 1:
        store.set("heard", "")
    return text


def meeting_point(launch: Launched) -> str:
    """Host and port, for people."""
    if launch.address == "env://":
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return launch.address.removeprefix("tcp://")
