"""The fifth stage: programs run as ranks: worker processes, a launcher's processes, or this one."""

from autopar.runtime.buckets import replica_owners
from autopar.runtime.contents import OptionChange
from autopar.runtime.ema import with_averages
from autopar.runtime.executor import Span, StepData
from autopar.runtime.folder import (
    check_files,
    checkpoint_around,
    copy_checkpoint,
    is_checkpoint,
    read_header,
    remove_checkpoint,
)
from autopar.runtime.launch import Launched, launched, starts_once, told_by_first
from autopar.runtime.optimizer_state import with_optimizer
from autopar.runtime.pool import WorkerPool
from autopar.runtime.reading import settled, start_reading
from autopar.runtime.spec import (
    Parameters,
    RankSpec,
    RankStats,
    Reading,
    StepNumbers,
    StepOutcome,
    UpdateResult,
    Work,
    rank_text,
)
from autopar.runtime.spmd import LocalRanks, TorchrunRanks
from autopar.runtime.transport import TransportName

__all__ = [
    "Launched", "LocalRanks", "OptionChange", "Parameters", "RankSpec", "RankStats", "Reading", "Span", "StepData",
    "StepNumbers", "StepOutcome", "TorchrunRanks", "TransportName", "UpdateResult", "Work", "WorkerPool", "check_files",
    "checkpoint_around", "copy_checkpoint", "is_checkpoint", "launched", "rank_text", "read_header",
    "remove_checkpoint", "replica_owners", "settled", "start_reading", "starts_once", "told_by_first",
    "with_averages", "with_optimizer",
]  # fmt: skip
