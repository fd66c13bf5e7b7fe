"""What the process that measures is told."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.hardware import ExecutionMode
from autopar.ir.program import Program
from autopar.runtime.launch.torch_settings import TorchSettings

PIECES, TIMES = "pieces.pickle", "times.jsonl"


@dataclass(frozen=True)
class Task:
    """Pieces, each with the ranks of its tensor-parallel axis, and how to run them; ``threads`` is 0 on GPUs."""

    pieces: tuple[tuple[Program, int], ...]
    device_type: str
    execution_mode: ExecutionMode
    threads: int
    settings: TorchSettings
