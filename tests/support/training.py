"""A small classifier of digits on one device of this process, its trainer, and a callback that records hooks."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.train import (
    Augmentation,
    Batch,
    Callback,
    Data,
    Trainer,
    TrainerView,
    Wanted,
    evaluation_loader,
    load_data,
    training_loader,
)
from autopar.train.data.images import Images
from autopar.train.data.streams import Stream

ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)
SHIFTED = Augmentation(shift=1)


@functools.cache
def digits() -> Data:
    """Images of 8 × 8 pixels: 100 to train on, which makes 5 updates an epoch, and 50 to test on."""
    return load_data("digits", Wanted(8, 1, num_train=100, num_test=50))


def indexed(images: Images | Stream) -> Images:
    """Images that are read by index."""
    assert not isinstance(images, Stream)
    return images


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(one, other, strict=True))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))


def parallel(batch: int = 20, **options) -> autopar.ParallelModel:
    return autopar.parallelize(small(), 1, torch.empty(batch, 1, 8, 8), optimizer=ADAMW, **options)


def trainer(pm: autopar.ParallelModel, batch: int = 20, epochs: int = 2, k: int = 1, **options) -> Trainer:
    """Trainer on `digits`; ``k`` is grad_accum_steps."""
    loader = training_loader(pm, digits(), batch, seed=1, augmentation=SHIFTED, grad_accum_steps=k)
    return Trainer(pm, loader, evaluation_loader(digits(), 16, pm), epochs=epochs, grad_accum_steps=k, **options)


class Record(Callback):
    """Names of the hooks in the order of their calls; Ctrl-C in the step of update ``fail_at``."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at

    def on_start(self, trainer: TrainerView) -> None:
        self.calls.append("start")

    def on_step(self, trainer: TrainerView, report) -> None:
        self.calls.append(f"step {report.epoch}.{report.step}")
        if report.update == self.fail_at:
            raise KeyboardInterrupt

    def on_epoch(self, trainer: TrainerView, report) -> None:
        assert trainer.history[-1] is report and trainer.position.update == report.update
        self.calls.append(f"epoch {report.epoch}")

    def on_checkpoint(self, trainer: TrainerView, folder: Path) -> None:
        self.calls.append(folder.name)

    def on_end(self, trainer: TrainerView) -> None:
        self.calls.append("end")
