"""What the process that measures is task."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.hardware import ExecutionMode
from autopar.ir.program import Program
from autopar.runtime.launch.torch_settings import TorchSettings

TASK_FILE, TIMES_FILE = "pieces.pickle", "times.jsonl"


@dataclass(frozen=True)
class RegionTask:
    """Pieces, each with the ranks of its tensor-parallel axis, and how to run them; ``threads`` is 0 on GPUs."""

    regions: tuple[tuple[Program, int], ...]
    device_type: str
    execution_mode: ExecutionMode
    threads: int
    settings: TorchSettings
