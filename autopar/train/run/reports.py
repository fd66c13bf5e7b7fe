"""A training run as its callbacks see it: where it is, and the reports of its steps and epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Protocol

from autopar.api.model import ParallelModel


@dataclass(frozen=True)
class StepReport:
    """Report of one update.

    ``epoch``, ``step`` (within the epoch) and ``update`` (in all) count from 1. ``lr`` is the largest learning rate
    of the parameter groups in this update. ``samples_per_second`` is the mean over the epoch so far, without
    evaluations; it counts each image once. ``data_share`` is the share of that time in which devices waited for the
    next batch: a GPU that still computes the last update waits for none. ``skipped`` is true if a float16 overflow
    skipped the update; its loss does not count in means.
    """

    epoch: int
    step: int
    update: int
    loss: float
    lr: float
    grad_norm: float | None
    samples_per_second: float
    peak_bytes: int
    skipped: bool
    data_share: float


@dataclass(frozen=True)
class EpochReport:
    """Report of one epoch.

    ``loss`` is the mean over its steps, ``lr`` the learning rate of its first step. ``accuracy``, ``top5`` and
    ``test_loss`` are those of the evaluation, ``ema_accuracy`` that of the averaged weights; each is None without such
    an evaluation. ``best`` is true if no earlier epoch had as high a score. ``peak_bytes`` is the peak of any rank so
    far, see `autopar.runtime.spec.RankStats`: on CPU it counts more than the tensors that the plan predicts.
    ``data_share`` is as in a `StepReport`.
    """

    epoch: int
    update: int
    loss: float
    lr: float
    samples_per_second: float
    peak_bytes: int
    accuracy: float | None
    top5: float | None
    test_loss: float | None
    ema_accuracy: float | None
    best: bool
    data_share: float = 0.0

    @property
    def score(self) -> float | None:
        """Accuracy that decides which epoch is the best: of the averaged weights if there are any."""
        return self.accuracy if self.ema_accuracy is None else self.ema_accuracy


@dataclass(frozen=True)
class RunPosition:
    """Position of a training run: in epoch ``epoch`` (from 1), after ``step`` of its ``steps`` updates."""

    epoch: int
    step: int
    steps: int

    @property
    def update(self) -> int:
        """Updates done since the start of the run."""
        return (self.epoch - 1) * self.steps + self.step

    @property
    def epoch_done(self) -> bool:
        return self.step == self.steps

    @property
    def next(self) -> RunPosition:
        """Position after one more update."""
        return RunPosition(self.epoch, self.step + 1, self.steps)

    @property
    def next_epoch(self) -> RunPosition:
        return RunPosition(self.epoch + 1, 0, self.steps)


@dataclass(frozen=True)
class EpochSums:
    """Sums over the updates of an epoch so far: losses and their count, seconds of training steps, samples.

    ``elapsed`` are the seconds since the start of the epoch, ``data_seconds`` those in which this process waited for
    the next batch.
    """

    loss: float = 0.0
    count: int = 0
    seconds: float = 0.0
    samples: int = 0
    lr: float = 0.0
    data_seconds: float = 0.0
    elapsed: float = 0.0

    def plus(
        self, loss: float | None, seconds: float, samples: int, lr: float, data_seconds: float, elapsed: float
    ) -> EpochSums:
        """Sums with one more update, ``elapsed`` after the start of the epoch; ``loss`` is None if it was skipped."""
        return EpochSums(
            self.loss + (loss or 0.0),
            self.count + (loss is not None),
            self.seconds + seconds,
            self.samples + samples,
            self.lr if self.samples else lr,
            self.data_seconds + data_seconds,
            elapsed,
        )

    @property
    def mean_loss(self) -> float:
        """Mean loss; NaN if no update counted."""
        return self.loss / self.count if self.count else float("nan")

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.elapsed if self.elapsed else 0.0

    @property
    def data_share(self) -> float:
        idle = max(0.0, self.elapsed - self.seconds)
        return min(self.data_seconds, idle) / self.elapsed if self.elapsed else 0.0


class TrainerView(Protocol):
    """View of an `autopar.train.Trainer` for callbacks: attributes that they may read, and one method.

    ``saved`` is the position of the last checkpoint that was written or read. ``resumed`` is the checkpoint from
    which the run resumed. Callbacks add the folders that they write to ``run_folders``, and the run's IDs in trackers
    (by the tracker's name) to ``run_ids``, which checkpoints keep. ``error`` is what ends the training, in `on_end`;
    None after a normal end.
    """

    @property
    def pm(self) -> ParallelModel: ...
    @property
    def epochs(self) -> int: ...
    @property
    def position(self) -> RunPosition: ...
    @property
    def history(self) -> Sequence[EpochReport]: ...
    @property
    def best(self) -> float | None: ...
    @property
    def saved(self) -> RunPosition | None: ...
    @property
    def resumed(self) -> Path | None: ...
    @property
    def run_folders(self) -> set[Path]: ...
    @property
    def run_ids(self) -> dict[str, str]: ...
    @property
    def error(self) -> BaseException | None: ...

    def save(self, folder: str | PathLike[str], keep: int = 1) -> None:
        """Write a checkpoint of the model and of the run's position; ``keep`` checkpoints stay in the folder."""
        ...
