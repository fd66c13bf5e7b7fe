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
    """What one update came to.

    ``epoch`` and ``step`` (within it) and ``update`` (in all) count from 1. ``lr`` is the largest of the parameter
    groups, as this update used it. ``samples_per_second`` counts each image of the epoch so far once, and the time of
    training steps only. ``skipped`` is true where a float16 overflow made the update void; its loss does not count.
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


@dataclass(frozen=True)
class EpochReport:
    """What one epoch came to.

    ``loss`` is the mean of its steps, ``lr`` that of its first one; ``accuracy``, ``top5`` and ``test_loss`` are from
    the evaluation, ``ema_accuracy`` from that of the averaged weights, each None where there is no such thing. ``best``
    says whether no epoch before was as good. ``peak_bytes`` is the most that any rank has used so far, as
    `autopar.runtime.spec.RankStats` says: on CPU that counts more than tensors, which the plan predicts.
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

    @property
    def score(self) -> float | None:
        """What decides which epoch is the best: higher is better."""
        return self.accuracy if self.ema_accuracy is None else self.ema_accuracy


@dataclass(frozen=True)
class RunPosition:
    """How far a training run is: in epoch ``epoch`` (from 1), after ``step`` of ``steps`` updates of it."""

    epoch: int
    step: int
    steps: int

    @property
    def update(self) -> int:
        """Updates done in all."""
        return (self.epoch - 1) * self.steps + self.step

    @property
    def epoch_done(self) -> bool:
        return self.step == self.steps

    @property
    def next(self) -> RunPosition:
        """After one more update."""
        return RunPosition(self.epoch, self.step + 1, self.steps)

    @property
    def next_epoch(self) -> RunPosition:
        return RunPosition(self.epoch + 1, 0, self.steps)


@dataclass(frozen=True)
class EpochSums:
    """Sums over the updates of an epoch so far: losses and how many, seconds of training, samples."""

    loss: float = 0.0
    count: int = 0
    seconds: float = 0.0
    samples: int = 0
    lr: float = 0.0

    def plus(self, loss: float | None, seconds: float, samples: int, lr: float) -> EpochSums:
        """With one more update; ``loss`` is None where it was void."""
        return EpochSums(
            self.loss + (loss or 0.0),
            self.count + (loss is not None),
            self.seconds + seconds,
            self.samples + samples,
            self.lr if self.samples else lr,
        )

    @property
    def mean_loss(self) -> float:
        """NaN where no update counted."""
        return self.loss / self.count if self.count else float("nan")

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


class TrainerView(Protocol):
    """What callbacks may read of a `autopar.train.Trainer`, and its one method for them.

    ``saved`` is the position of the last checkpoint that was written or read. ``resumed`` is the checkpoint that the
    run goes on from. Callbacks add the folders that they write to ``run_folders``.
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

    def save(self, folder: str | PathLike[str]) -> None:
        """Write a checkpoint of the model and of the run's position."""
        ...
