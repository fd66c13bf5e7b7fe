"""Devices of a run: GPUs or CPU processes, on this machine or under a launcher, and the cost model for them."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from autopar.errors import SEE_DOCTOR, UsageError, caller_level
from autopar.ir.hardware import Hardware
from autopar.ir.network import Network, Port
from autopar.ir.units import plural
from autopar.runtime.launch.environment import Launched, launched, starts_once

# Cost model by a substring of the CUDA device name.
DEVICE_COST_MODELS = {"H200": "h200-nvlink", "H100": "h100-nvlink", "A100": "a100-nvlink", "4090": "rtx4090-pcie"}
DEFAULT_GPU_COST_MODEL = "a100-nvlink"
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class RankDevice:
    """Name of a rank's device and its memory in byte; CPU processes share their host's memory equally."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Devices of one run. ``num_threads`` is the number of CPU threads of each process."""

    backend: str
    device_type: str
    num_threads: int
    launched: Launched | None

    def local_devices(self, devices: int) -> int:
        """Number of devices that share a host; with several hosts, the number on the fullest one."""
        return self.launched.devices_per_node if self.launched else devices

    def device_of(self, rank: int) -> str:
        """Torch device of a rank."""
        if self.device_type == "cpu":
            return "cpu"
        if self.launched is None:
            return f"cuda:{rank}"
        # A launcher may make only one GPU visible to each process (srun --gpus-per-task=1).
        return f"cuda:{self.launched.local_rank if torch.cuda.device_count() > 1 else 0}"

    def rank_device(self, rank: int, devices: int) -> RankDevice:
        """Device of a rank; under a launcher, of this process's rank."""
        if self.device_type == "cpu":
            return RankDevice(cpu_name(), psutil.virtual_memory().total // self.local_devices(devices))
        properties = torch.cuda.get_device_properties(self.device_of(rank))
        return RankDevice(properties.name, properties.total_memory)

    def limit_threads(self) -> None:
        """Divide this host's processors among its processes. torchrun does the same, srun leaves it to the program."""
        if self.device_type == "cpu":
            torch.set_num_threads(self.num_threads)

    def described(self, hardware: Hardware) -> Hardware:
        """Cost model with this run's nodes: the number of devices per node and the network between nodes."""
        if self.launched is None or self.launched.num_nodes == 1:
            return hardware
        network = hardware.network
        inside = [link for link in (hardware.link, hardware.collective) if link is not None]
        if network is None and inside:
            network = Network(Port(max(i.latency_seconds for i in inside), min(i.bytes_per_second for i in inside)))
            warnings.warn(
                f"Cost model {hardware.name} has no network: links between the {self.launched.num_nodes} nodes are "
                "priced like those inside one. Pass hardware= with a [network] table.",
                stacklevel=caller_level(),
            )
        return replace(hardware, devices_per_node=self.launched.devices_per_node, network=network)

    def warn_of_other_gpus(self, hardware: Hardware, gpus: Iterable[str]) -> None:
        """Warn if a cost model describes another device than one of these GPUs, the run's."""
        if self.device_type == "cpu":
            return
        gpu = next((gpu for gpu in gpus if not describes(hardware, gpu)), None)
        if gpu is not None:
            warnings.warn(
                f"Cost model {hardware.name} describes {hardware.device}, and this run has {gpu}: times and memory "
                "are predicted for the other. Measure this one with `autopar profile` and pass its file as hardware=.",
                stacklevel=caller_level(),
            )


def describes(hardware: Hardware, gpu: str) -> bool:
    """Whether a cost model describes a GPU of this name."""
    device = hardware.device
    return gpu in device or any(part in gpu and part in device for part in DEVICE_COST_MODELS)


def this_machine(devices: int | None = None, backend: str | None = None) -> Machine:
    """Machine that a run over ``devices`` uses: NCCL on GPUs if there are any, else Gloo on CPU processes.

    Raises:
        UsageError: too few GPUs, an unavailable backend, or a count that differs from the launcher's.
    """
    launch = launched()
    if devices is not None:
        check_world(launch, devices)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus == 0:
        raise UsageError(
            f'backend="nccl" needs GPUs and there is none here. Leave it out to run on CPU over Gloo. {SEE_DOCTOR}'
        )
    if launch is None and (devices or 1) > 1:
        warn_of_idle_nodes(devices)
    if gpus == 0 or backend == "gloo":
        processes = launch.local_world if launch else devices or 1
        return Machine("gloo", "cpu", rank_threads(processes, launch), launch)
    if devices is not None and launch is None and devices > gpus:
        raise UsageError(
            f"devices={devices}, but this machine has {plural(gpus, 'GPU')}. "
            f'Pass devices={gpus}, or backend="gloo" to try it on CPU processes.{slurm_hint()} {SEE_DOCTOR}'
        )
    if launch is not None and 1 < gpus <= launch.local_rank:
        raise UsageError(
            f"Rank {launch.rank} is number {launch.local_rank} of its node's {launch.local_world} processes, and the "
            f'node has {gpus} GPUs. Start {gpus} processes per node, or pass backend="gloo" to try it on CPU. '
            f"{SEE_DOCTOR}"
        )
    return Machine("nccl", "cuda", torch.get_num_threads(), launch)


def check_world(launch: Launched | None, devices: int) -> None:
    """Raise a UsageError if a launcher has started another number of processes than ``devices``."""
    if launch is not None and launch.world != devices:
        flag = "--nproc-per-node" if launch.launcher == "torchrun" else "--ntasks"
        raise UsageError(
            f"devices={devices}, but {launch.launcher} started {plural(launch.world, 'process', 'es')}. "
            f"Pass devices={launch.world} or {flag} {devices}."
        )


def rank_threads(processes: int, launch: Launched | None) -> int:
    """CPU threads of each of a host's processes: an equal share of its processors.

    A launcher's process keeps a smaller number of its own, and the number in OMP_NUM_THREADS, which torchrun sets.
    """
    share = max(1, num_processors() // processes)
    if launch is None:
        return share
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else min(threads, share)


@functools.cache
def cpu_name() -> str:
    """The processor's name from /proc/cpuinfo, or the instruction set that torch uses where that names none."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{torch.backends.cpu.get_cpu_capability()} CPU"


def num_processors() -> int:
    """Number of processors that this process may use. A task of srun or a container has only a part of the host's."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def slurm_hint() -> str:
    """Remedy for a Slurm job in which python was started once; an empty text outside such jobs."""
    if "SLURM_PROCID" not in os.environ or not starts_once(os.environ):
        return ""
    return " This is a Slurm job in which python runs once: start it with `srun python …` to have a process per task."


def warn_of_idle_nodes(devices: int | None) -> None:
    """Warn if Slurm runs the script once, on the first node of its job, so that the other nodes stay idle."""
    hint, nodes = slurm_hint(), os.environ.get("SLURM_NNODES", "1")
    if hint and nodes != "1":
        warnings.warn(
            f"All {devices} devices are on the first of this job's {nodes} nodes.{hint}", stacklevel=caller_level()
        )


def default_hardware_name(machine: Machine) -> str:
    """Name of the cost model for this machine's devices. An unknown GPU is priced as an A100, with a warning."""
    if machine.device_type == "cpu":
        return "cpu-generic"
    name = torch.cuda.get_device_name()
    if (cost_model := gpu_cost_model(name)) is not None:
        return cost_model
    warnings.warn(
        f"No cost model for {name}: planning with {DEFAULT_GPU_COST_MODEL}. Pass hardware=.", stacklevel=caller_level()
    )
    return DEFAULT_GPU_COST_MODEL


def gpu_cost_model(name: str) -> str | None:
    """Name of the cost model for GPUs of a name; None for an unknown one."""
    return next((cost_model for part, cost_model in DEVICE_COST_MODELS.items() if part in name), None)
