"""What there is to run on: GPUs or CPU processes, here or under a launcher."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, replace

import torch

from autopar.errors import UsageError
from autopar.ir.hardware import Hardware, Link
from autopar.ir.units import plural
from autopar.runtime.launch.environment import Launched, launched, starts_once

# Substrings of CUDA device names, and the cost model that describes such a device.
DEVICE_COST_MODELS = {"H200": "h200-nvlink", "H100": "h100-nvlink", "A100": "a100-nvlink", "4090": "rtx4090-pcie"}
DEFAULT_GPU_COST_MODEL = "a100-nvlink"


@dataclass(frozen=True)
class Machine:
    """The devices of one run. ``num_threads`` is for each process, on CPU."""

    backend: str
    device_type: str
    num_threads: int
    launched: Launched | None

    def local_devices(self, devices: int) -> int:
        """How many of the devices share a host; on the fullest one, where there are several."""
        return self.launched.devices_per_node if self.launched else devices

    def device_of(self, rank: int) -> str:
        """The torch device of a rank."""
        if self.device_type == "cpu":
            return "cpu"
        if self.launched is None:
            return f"cuda:{rank}"
        # A launcher may show each process its own GPU alone (srun --gpus-per-task=1).
        return f"cuda:{self.launched.local_rank if torch.cuda.device_count() > 1 else 0}"

    def limit_threads(self) -> None:
        """Share this host's processors among its processes, as torchrun does and srun leaves to the program."""
        if self.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(min(torch.get_num_threads(), self.num_threads))

    def described(self, hardware: Hardware) -> Hardware:
        """A cost model with this run's nodes: how many devices each has, and what lies between them."""
        if self.launched is None or self.launched.num_nodes == 1:
            return hardware
        network = hardware.network
        inside = [link for link in (hardware.link, hardware.collective) if link is not None]
        if network is None and inside:
            network = Link(max(i.latency_seconds for i in inside), min(i.bytes_per_second for i in inside))
            warnings.warn(
                f"Cost model {hardware.name} has no network: links between the {self.launched.num_nodes} nodes are "
                "priced like those inside one. Pass hardware= with a [network] table.",
                stacklevel=3,
            )
        return replace(hardware, devices_per_node=self.launched.devices_per_node, network=network)

    def warn_of_other_gpu(self, hardware: Hardware) -> None:
        """Say that a cost model describes another device than the GPU here."""
        if self.device_type == "cpu":
            return
        here = torch.cuda.get_device_name()
        if not describes(hardware, here):
            warnings.warn(
                f"Cost model {hardware.name} describes {hardware.device}, and this is {here}: times and memory "
                "are predicted for the other. Measure this one with `autopar profile` and pass its file as hardware=.",
                stacklevel=3,
            )


def describes(hardware: Hardware, gpu: str) -> bool:
    """Whether a cost model is of such a GPU, by its name."""
    known = hardware.device
    return gpu in known or any(part in gpu and part in known for part in DEVICE_COST_MODELS)


def this_machine(devices: int | None = None, backend: str | None = None) -> Machine:
    """What a run over ``devices`` would use: NCCL on GPUs where there are any, else Gloo on CPU processes.

    Raises:
        UsageError: too few GPUs, a backend that is not here, or a count that disagrees with the launcher's.
    """
    launch = launched()
    if launch is not None and devices is not None and launch.world != devices:
        flag = "--nproc-per-node" if launch.launcher == "torchrun" else "--ntasks"
        raise UsageError(
            f"devices={devices}, but {launch.launcher} started {plural(launch.world, 'process', 'es')}. "
            f"Pass devices={launch.world} or {flag} {devices}."
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus == 0:
        raise UsageError('backend="nccl" needs GPUs and there is none here. Leave it out to run on CPU over Gloo.')
    if launch is None and (devices or 1) > 1:
        warn_of_idle_nodes(devices)
    if gpus == 0 or backend == "gloo":
        processes = launch.local_world if launch else devices or 1
        return Machine("gloo", "cpu", max(1, num_processors() // processes), launch)
    if devices is not None and launch is None and devices > gpus:
        raise UsageError(
            f"devices={devices}, but this machine has {plural(gpus, 'GPU')}. "
            f'Pass devices={gpus}, or backend="gloo" to try it on CPU processes.{slurm_hint()}'
        )
    if launch is not None and 1 < gpus <= launch.local_rank:
        raise UsageError(
            f"Rank {launch.rank} is number {launch.local_rank} of its node's {launch.local_world} processes, and the "
            f'node has {gpus} GPUs. Start {gpus} processes per node, or pass backend="gloo" to try it on CPU.'
        )
    return Machine("nccl", "cuda", torch.get_num_threads(), launch)


def num_processors() -> int:
    """Processors that this process may use; srun's tasks and containers have a part of the host's."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def slurm_hint() -> str:
    """What to do in a Slurm job where python was started once; nothing elsewhere."""
    if "SLURM_PROCID" not in os.environ or not starts_once(os.environ):
        return ""
    return " This is a Slurm job in which python runs once: start it with `srun python …` to have a process per task."


def warn_of_idle_nodes(devices: int | None) -> None:
    """Say that a script which Slurm runs on the first node of a job uses none of the others."""
    hint, nodes = slurm_hint(), os.environ.get("SLURM_NNODES", "1")
    if hint and nodes != "1":
        warnings.warn(f"All {devices} devices are on the first of this job's {nodes} nodes.{hint}", stacklevel=4)


def default_hardware_name(machine: Machine) -> str:
    """The cost model for the devices at hand; an unknown GPU is priced as an A100, with a warning."""
    if machine.device_type == "cpu":
        return "cpu-generic"
    name = torch.cuda.get_device_name()
    for part, cost_model in DEVICE_COST_MODELS.items():
        if part in name:
            return cost_model
    warnings.warn(f"No cost model for {name}: planning with {DEFAULT_GPU_COST_MODEL}. Pass hardware=.", stacklevel=3)
    return DEFAULT_GPU_COST_MODEL
