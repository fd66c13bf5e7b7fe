"""TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.train.callbacks import Callback
from autopar.train.rank_zero import is_rank_zero
from autopar.train.run.reports import EpochReport, StepReport, TrainerView
from autopar.train.timm_optional import needed
from autopar.train.trackers.scalars import EPOCHS, STEPS, scalars


class TensorBoard(Callback):
    """Writes the figures of each step and epoch for TensorBoard, under the names of `scalars`."""

    def __init__(self, folder: Path) -> None:
        """Raise a UsageError if tensorboard is not installed."""
        needed("tensorboard", "TensorBoard logging")
        self.folder = folder
        self.writer: Any = None

    def on_start(self, trainer: TrainerView) -> None:
        if is_rank_zero():
            make = needed("torch.utils.tensorboard", "TensorBoard logging", "tensorboard").SummaryWriter
            self.writer = make(str(self.folder), purge_step=trainer.position.update + 1)

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        del trainer
        self.write(STEPS, report)

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        del trainer
        self.write(EPOCHS, report)

    def write(self, group: str, report: StepReport | EpochReport) -> None:
        """Write a report's figures, on rank 0."""
        if self.writer is not None:
            for name, value in scalars(group, report).items():
                self.writer.add_scalar(name, value, report.update)

    def on_end(self, trainer: TrainerView) -> None:
        del trainer
        if self.writer is not None:
            self.writer.close()
