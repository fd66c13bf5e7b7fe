"""The training loop on one device in this process: accumulation, rates, losses, bad arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.handmade import in_threads
from support.train_cli import losses
from support.training import ADAMW, Record, digits, parallel, small, trainer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

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
from autopar.train.data.loader import TimedBatches
from autopar.train.run.reports import EpochSums


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
    mixed = training_loader(pm, digits(), 40, grad_accum_steps=k, mixup=Mixup(10, mixup=0.5))
    seen = Seen()
    trainer = Trainer(pm, mixed, epochs=2, grad_accum_steps=k, callbacks=(seen,))
    monkeypatch.setattr(TimedBatches, "elapsed", lambda _: 0.5 * trainer.position.step)  # as if updates took so long
    trainer.fit()
    assert seen.rates == [40 / 0.5] * 4


class Seen(Callback):
    """Images per second of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step(self, trainer: autopar.train.TrainerView, report: StepReport) -> None:
        self.rates.append(report.samples_per_second)


@pytest.mark.parametrize("elapsed", [10.0, 0.0])
def test_a_resumed_epoch_counts_the_time_before(elapsed: float, monkeypatch: pytest.MonkeyPatch):
    """Checkpoints of earlier versions have no elapsed time, but that of steps."""
    monkeypatch.setattr(TimedBatches, "elapsed", lambda _: 1.0)
    with parallel() as pm:
        seen = Seen()
        trainer = Trainer(pm, training_loader(pm, digits(), 20), epochs=1, callbacks=(seen,))
        trainer.running = EpochSums(samples=900, seconds=10.0, elapsed=elapsed)
        trainer.fit()
    assert seen.rates[0] == pytest.approx(920 / 11)


def test_the_share_of_waits_for_data(monkeypatch: pytest.MonkeyPatch):
    """By a clock that moves only while a batch is made, and with each report."""
    now = 0.0
    monkeypatch.setattr("autopar.train.data.loader.perf_counter", lambda: now)

    class Slow:
        def __len__(self) -> int:
            return 5

        def epoch(self, number: int, first: int = 0):
            nonlocal now
            for batch in training_loader(pm, digits(), 20).epoch(number, first):
                now += 3000 * number
                yield batch

    class Busy(Callback):
        def on_step(self, trainer, report) -> None:
            nonlocal now
            now += 3000.0  # beside which the steps' own time is nothing
            shares.append(report.data_share)

    shares: list[float] = []
    with parallel() as pm:
        history = Trainer(pm, Slow(), epochs=2, callbacks=(Busy(),)).fit()
    # The time of a step's report counts for the next step.
    assert shares[:5] == pytest.approx([1, 6 / 9, 9 / 15, 12 / 21, 15 / 27], abs=1e-3)
    assert [report.data_share for report in history] == pytest.approx([15 / 27, 30 / 42], abs=1e-3)
    assert [r.samples_per_second for r in history] == pytest.approx([100 / 27000, 100 / 42000], rel=1e-6)


def test_a_loader_of_the_users_own():
    x, y = torch.randn(50, 1, 8, 8), torch.randint(10, (50,))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    record = Record()
    with parallel(16) as pm:
        history = Trainer(pm, loader, loader, epochs=2, callbacks=(record,)).fit()
    assert record.calls.count("step 2.4") == 1 and len(history) == 2
    assert history[1].loss < history[0].loss


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self):
        return iter(SAMPLES)


class Short(Stream):
    """Says that it has more samples than it has."""

    def __len__(self) -> int:
        return 70


SAMPLES = TensorDataset(torch.randn(50, 1, 8, 8), torch.arange(50) % 10)


@pytest.mark.parametrize(
    "target", [lambda y: y, lambda y: {"labels": y}, lambda y: (y, y)], ids=["tensor", "dict", "tuple"]
)
def test_a_ragged_last_batch_weighs_each_sample_once(target: Any):
    """50 samples in batches of 20, 20 and 10 are one update: as on all of them, whatever holds the targets."""
    loss_fn = Labelled()
    collate = lambda samples: (torch.stack([x for x, _ in samples]), target(torch.stack([y for _, y in samples])))  # noqa: E731
    states, reports = [], []
    for size, k in ((20, 3), (50, 1)):
        loader = DataLoader(SAMPLES, batch_size=size, collate_fn=collate)
        with parallel(size, loss_fn=loss_fn, microbatches=1) as pm:
            reports.append(Trainer(pm, loader, epochs=1, grad_accum_steps=k).fit()[0])
            states.append(pm.state_dict())
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)
    assert all(torch.allclose(t, states[1][n], atol=1e-6) for n, t in states[0].items())


class Labelled:
    """Cross-entropy of labels, or of the first of several targets."""

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        y = target["labels"] if isinstance(target, dict) else target
        return nn.functional.cross_entropy(output, y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=10), "loader, a DataLoader, is not known, .*'Stream' has no"),
        (
            lambda: DataLoader(Short(), batch_size=10),
            r"The loader ended after 5 batches of epoch 1; its len\(\) is 7\.",
        ),
        (
            lambda: DataLoader([{"x": x, "y": y} for x, y in SAMPLES], batch_size=10),  # type: ignore[arg-type]
            r"Batch 0 of the loader is a dict with 'x', 'y'; it must be a pair \(x, y\)",
        ),
        (lambda: DataLoader(TensorDataset(SAMPLES.tensors[0])), "Batch 0 of the loader is a list; it must be a pair"),
        (
            lambda: DataLoader([(1, "a")], batch_size=1, collate_fn=lambda pairs: pairs[0]),  # type: ignore[arg-type]
            "Batch 0 of the loader has no tensor with samples: x is an int, y is a str. Give the DataLoader",
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_loaders_that_cannot_be_trained_on(make: Any, message: str):
    with parallel(10) as pm, pytest.raises(UsageError, match=message):
        Trainer(pm, make(), epochs=1).fit()


def test_batches_that_replicas_cannot_share_are_refused_before_they_are_read():
    x = torch.empty(20, 1, 8, 8)
    pm = in_threads(small(), autopar.plan(small(), 4, x, dp=4, microbatches=1), x, nn.functional.cross_entropy)

    def trainer(size: int, k: int = 1, **options: Any) -> Trainer:
        return Trainer(pm, DataLoader(SAMPLES, size, **options), epochs=1, grad_accum_steps=k)

    message = r"The loader makes 50 samples into batches of 20, the last one of 10, and 4 data.*drop_last=True"
    with pytest.raises(UsageError, match=message):
        trainer(20)
    with pytest.raises(UsageError, match=r"batches of 25, and 4 .* Use a batch_size that is a multiple of 4"):
        trainer(25)
    pairs = BatchSampler(SequentialSampler(SAMPLES), 6, drop_last=False)
    with pytest.raises(UsageError, match="into batches of 6, the last one of 2, and 4"):
        Trainer(pm, DataLoader(SAMPLES, batch_sampler=pairs), epochs=1)
    trainer(20, drop_last=True)
    trainer(20, k=2)  # the third batch belongs to no update
    trainer(16, sampler=range(48))


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
