"""The fifth stage: programs run as ranks: worker processes, a launcher's processes, or this one."""

from autopar.runtime.executor import Span, StepData
from autopar.runtime.launch import Launched, launched, starts_once
from autopar.runtime.pool import WorkerPool
from autopar.runtime.reduce import assigned
from autopar.runtime.spec import Parameters, RankSpec, RankStats, StepOutcome, Work, rank_text
from autopar.runtime.spmd import LocalRanks, TorchrunRanks

__all__ = [
    "Launched", "LocalRanks", "Parameters", "RankSpec", "RankStats", "Span", "StepData", "StepOutcome", "TorchrunRanks",
    "Work", "WorkerPool", "assigned", "launched", "rank_text", "starts_once",
]  # fmt: skip
