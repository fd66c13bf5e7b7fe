"""What there is to run on: GPUs or CPU processes, here or under a launcher."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch

from autopar.errors import UsageError
from autopar.runtime import Launched, launched

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
        """How many of the devices share this host."""
        return self.launched.local_world if self.launched else devices

    def device_of(self, rank: int) -> str:
        """The torch device of a rank."""
        if self.device_type == "cpu":
            return "cpu"
        return f"cuda:{self.launched.local_rank if self.launched else rank}"


def this_machine(devices: int | None = None, backend: str | None = None) -> Machine:
    """What a run over ``devices`` would use: NCCL on GPUs where there are any, else Gloo on CPU processes.

    Raises:
        UsageError: too few GPUs, a backend that is not here, or a count that disagrees with torchrun's.
    """
    launch = launched()
    if launch is not None and devices is not None and launch.world != devices:
        raise UsageError(
            f"devices={devices}, but torchrun started {launch.world} processes. "
            f"Pass devices={launch.world} or --nproc-per-node {devices}."
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus == 0:
        raise UsageError('backend="nccl" needs GPUs and there is none here. Leave it out to run on CPU over Gloo.')
    if gpus == 0 or backend == "gloo":
        processes = devices or 1
        return Machine("gloo", "cpu", max(1, (os.cpu_count() or 1) // processes), launch)
    if devices is not None and launch is None and devices > gpus:
        raise UsageError(
            f"devices={devices}, but this machine has {gpus} GPUs. "
            f'Pass devices={gpus}, or backend="gloo" to try it on CPU processes.'
        )
    return Machine("nccl", "cuda", torch.get_num_threads(), launch)


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
