"""The payload of the worker processes that time regions."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.hardware import ExecutionMode
from autopar.ir.program import Program
from autopar.runtime.launch.torch_settings import TorchSettings


@dataclass(frozen=True)
class RegionTask:
    """Regions to time, and how to run them.

    Args:
        regions: each a program and the number of ranks of its tensor-parallel axis.
        threads: of each process, on CPU; 0 on GPUs.
    """

    regions: tuple[tuple[Program, int], ...]
    device_type: str
    execution_mode: ExecutionMode
    threads: int
    settings: TorchSettings
