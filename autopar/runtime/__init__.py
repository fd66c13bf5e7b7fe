"""The fifth stage: programs run as ranks: worker processes, torchrun's processes, or this one."""

from autopar.runtime.executor import Span, StepData
from autopar.runtime.pool import WorkerPool
from autopar.runtime.rank import RankSpec, RankStats, Work
from autopar.runtime.spmd import Launched, LocalRanks, TorchrunRanks, launched

__all__ = [
    "Launched", "LocalRanks", "RankSpec", "RankStats", "Span", "StepData", "TorchrunRanks", "Work", "WorkerPool",
    "launched",
]  # fmt: skip
