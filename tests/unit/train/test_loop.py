"""The training loop on one device in this process: accumulation, rates, losses, bad arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.handmade import in_threads
from support.train_cli import losses
from support.training import ADAMW, Record, digits, parallel, small, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.errors import TrainingError, UsageError
from autopar.train import (
    Augmentation,
    Callback,
    Checkpoints,
    JsonLog,
    Mixup,
    StepReport,
    Trainer,
    training_loader,
)


def test_accumulation_is_the_whole_batch(tmp_path: Path):
    states = []
    for k, folder in ((1, tmp_path / "1"), (4, tmp_path / "4")):
        with parallel(20 // k) as pm:
            trainer(pm, k=k, callbacks=(JsonLog(folder),)).fit()
            states.append(pm.state_dict())
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
    assert all(torch.allclose(t, states[1][n], atol=1e-5) for n, t in states[0].items())


@pytest.mark.parametrize(
    ("data_size", "mesh"), [(1, {"dp": 2}), (1, {"pp": 2}), (2, {"dp": 2})], ids=["dp", "pp", "dp under torchrun"]
)
@pytest.mark.parametrize("k", [1, 2])
def test_images_per_second_count_each_image_once(
    data_size: int, k: int, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """Under torchrun ``data_size`` processes read a part of each batch; else this one reads all."""
    x = torch.empty(40 // k // data_size, 1, 8, 8)
    plan = autopar.plan(small(), 2, x, **mesh)  # pyright: ignore[reportArgumentType]
    pm = in_threads(small(), plan, x, nn.functional.cross_entropy, optimizer=ADAMW)
    monkeypatch.setattr(pm, "data_size", data_size)
    monkeypatch.setattr(pm._ranks, "call_seconds", 0.5)  # as if each call had taken so long
    mixed = training_loader(pm, digits(), 40, grad_accum_steps=k, mixup=Mixup(10, mixup=0.5))
    seen = Seen()
    Trainer(pm, mixed, epochs=2, grad_accum_steps=k, callbacks=(seen,)).fit()
    assert seen.rates == [40 / (0.5 * k)] * 4


class Seen(Callback):
    """Images per second of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step(self, trainer: autopar.train.TrainerView, report: StepReport) -> None:
        self.rates.append(report.samples_per_second)


def test_a_loader_of_the_users_own():
    x, y = torch.randn(50, 1, 8, 8), torch.randint(10, (50,))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    record = Record()
    with parallel(16) as pm:
        history = Trainer(pm, loader, loader, epochs=2, callbacks=(record,)).fit()
    assert record.calls.count("step 2.4") == 1 and len(history) == 2
    assert history[1].loss < history[0].loss


def test_averaged_weights_decide_what_is_best():
    with parallel(ema=Averaged) as pm:
        history = trainer(pm, ema=True).fit()
    assert history[0].score == history[0].ema_accuracy and history[0].best
    assert history[1].score == history[0].score and not history[1].best  # the average stayed


class Averaged:
    """Keeps the first weights it saw."""

    def __init__(self, module: nn.Module) -> None:
        import copy

        self.module = copy.deepcopy(module)

    def update(self, module: nn.Module, step: int) -> None:
        """The average stays."""


class Poisoned:
    """A loader whose third batch of the second epoch holds an infinite number."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def epoch(self, number: int, first: int = 0):
        for i, batch in enumerate(self.inner.epoch(number, first), first):
            if (number, i) == (2, 2):
                batch.x[0, 0, 0, 0] = float("inf")
            yield batch


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path: Path):
    record = Record()
    with parallel() as pm:
        poisoned = Poisoned(training_loader(pm, digits(), 20, augmentation=Augmentation()))
        run = Trainer(pm, poisoned, epochs=3, callbacks=(Checkpoints(tmp_path), record))
        message = (
            rf"The loss became (nan|inf) in epoch 2, step 3 of 5, at a .* last checkpoint is {tmp_path}/last\. Use"
        )
        with pytest.raises(TrainingError, match=message):
            run.fit()
    assert record.calls[-3:] == ["step 2.1", "step 2.2", "end"]
    with parallel() as pm:
        again = Trainer(pm, training_loader(pm, digits(), 20), epochs=3)
        again.resume(tmp_path / "last")
        assert again.position.epoch == 2 and len(again.history) == 1


def test_numbers_out_of_range():
    with parallel() as pm:
        loader = training_loader(pm, digits(), 20)
        with pytest.raises(UsageError, match="epochs=0 and grad_accum_steps=1 must be at least 1"):
            Trainer(pm, loader, epochs=0)
        with pytest.raises(UsageError, match="An epoch has 5 batches, an update takes grad_accum_steps=6"):
            Trainer(pm, loader, epochs=1, grad_accum_steps=6)
        with pytest.raises(UsageError, match="A batch of 20 cannot be accumulated in 3 equal steps"):
            training_loader(pm, digits(), 20, grad_accum_steps=3)
        with pytest.raises(UsageError, match="A batch of 200 is more than the 100 training images"):
            training_loader(pm, digits(), 200)
