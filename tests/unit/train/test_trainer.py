"""The training loop, its callbacks and its checkpoints, on one device in this process."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from support.handmade import in_threads
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.errors import CheckpointError, TrainingError, UsageError
from autopar.runtime.checkpoint.folder import is_checkpoint
from autopar.train import (
    Augmentation,
    Batch,
    Callback,
    Checkpoints,
    Data,
    JsonLog,
    Mixup,
    ProgressBar,
    StepReport,
    TensorBoard,
    Trainer,
    Wanted,
    evaluate,
    evaluate_alone,
    evaluation_loader,
    load_data,
    load_weights,
    read_run,
    remove_run,
    save_weights,
    schedule,
    training_loader,
)
from autopar.train.evaluation import mean_scores, score_sums
from autopar.train.run.interrupt import deferred_interrupts
from autopar.train.run.reports import RunPosition

ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)
MOVED = Augmentation(shift=1)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data("digits", Wanted(8, 1, num_train=100, num_test=50))


def parallel(batch: int = 20, **options) -> autopar.ParallelModel:
    return autopar.parallelize(small(), 1, torch.empty(batch, 1, 8, 8), optimizer=ADAMW, **options)


def trainer(pm: autopar.ParallelModel, data: Data, batch: int = 20, epochs: int = 2, k: int = 1, **options) -> Trainer:
    loader = training_loader(pm, data, batch, seed=1, augmentation=MOVED, grad_accum_steps=k)
    return Trainer(pm, loader, evaluation_loader(data, 16, pm), epochs=epochs, grad_accum_steps=k, **options)


class Record(Callback):
    """Writes down which hooks were called when."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at

    def on_start(self, trainer: autopar.train.TrainerView) -> None:
        self.calls.append("start")

    def on_step(self, trainer: autopar.train.TrainerView, report) -> None:
        self.calls.append(f"step {report.epoch}.{report.step}")
        if report.update == self.fail_at:
            raise KeyboardInterrupt

    def on_epoch(self, trainer: autopar.train.TrainerView, report) -> None:
        assert trainer.history[-1] is report and trainer.position.update == report.update
        self.calls.append(f"epoch {report.epoch}")

    def on_checkpoint(self, trainer: autopar.train.TrainerView, folder: Path) -> None:
        self.calls.append(folder.name)

    def on_end(self, trainer: autopar.train.TrainerView) -> None:
        self.calls.append("end")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder / "steps.jsonl")]


# -- loop and callbacks ------------------------------------------------------------------------------------------------


def test_hooks_log_tensorboard_and_checkpoints(data: Data, tmp_path: Path, capsys: pytest.CaptureFixture):
    record = Record()
    make = schedule("cosine", 2, 5, warmup_epochs=0)
    with parallel(lr_scheduler=make) as pm:
        callbacks = (
            record, JsonLog(tmp_path), TensorBoard(tmp_path / "tb"), Checkpoints(tmp_path, every=3), ProgressBar(),
        )  # fmt: skip
        history = trainer(pm, data, schedule="timm", callbacks=callbacks).fit()
        scored = evaluate(pm, evaluation_loader(data, 16, pm).epoch(1))
    steps, epochs = lines(tmp_path / "steps.jsonl"), lines(tmp_path / "history.jsonl")
    assert [(s["epoch"], s["step"], s["update"]) for s in steps] == [(1 + i // 5, 1 + i % 5, 1 + i) for i in range(10)]
    assert [s["lr"] for s in steps] == [3e-3] * 5 + [pytest.approx(1.5e-3)] * 5
    assert [e["epoch"] for e in epochs] == [1, 2] and [e["update"] for e in epochs] == [5, 10]
    assert epochs[0]["loss"] == pytest.approx(sum(s["loss"] for s in steps[:5]) / 5)
    assert epochs[1]["accuracy"] == history[1].accuracy == scored.accuracy
    assert epochs[1]["test_loss"] == pytest.approx(scored.loss) and epochs[1]["top5"] == scored.top5 > scored.accuracy
    assert all(s["samples_per_second"] > 0 and s["peak_bytes"] > 0 and not s["skipped"] for s in steps)
    best = "best" if epochs[1]["best"] else None
    expected = ["start", *(f"step 1.{i}" for i in (1, 2, 3)), "last", "step 1.4", "step 1.5", "epoch 1", "best", "last"]
    expected += ["step 2.1", "last", "step 2.2", "step 2.3", "step 2.4", "last", "step 2.5", "epoch 2", best, "last"]
    assert record.calls == [*filter(None, expected), "end"]
    assert {path.name for path in tmp_path.iterdir()} >= {"last", "best", "tb"}
    assert re.search(
        r"^epoch 2/2  loss +\d\.\d+  accuracy .* %  lr 1\.5e-03  .* samples/s  ", capsys.readouterr().out, re.M
    )
    scalars = tensorboard(tmp_path / "tb")
    assert scalars["train/loss"] == [pytest.approx(s["loss"]) for s in steps]
    assert scalars["epoch/accuracy"] == [pytest.approx(e["accuracy"]) for e in epochs]


def tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_accumulation_is_the_whole_batch(data: Data, tmp_path: Path):
    states = []
    for k, folder in ((1, tmp_path / "1"), (4, tmp_path / "4")):
        with parallel(20 // k) as pm:
            trainer(pm, data, k=k, callbacks=(JsonLog(folder),)).fit()
            states.append(pm.state_dict())
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
    assert all(torch.allclose(t, states[1][n], atol=1e-5) for n, t in states[0].items())


@pytest.mark.parametrize(
    ("data_size", "mesh"), [(1, {"dp": 2}), (1, {"pp": 2}), (2, {"dp": 2})], ids=["dp", "pp", "dp under torchrun"]
)
@pytest.mark.parametrize("k", [1, 2])
def test_images_per_second_count_each_image_once(
    data_size: int, k: int, mesh: dict[str, int], data: Data, monkeypatch: pytest.MonkeyPatch
):
    """Under torchrun ``data_size`` processes read a part of each batch; else this one reads all."""
    x = torch.empty(40 // k // data_size, 1, 8, 8)
    plan = autopar.plan(small(), 2, x, **mesh)  # pyright: ignore[reportArgumentType]
    pm = in_threads(small(), plan, x, nn.functional.cross_entropy, optimizer=ADAMW)
    monkeypatch.setattr(pm, "data_size", data_size)
    monkeypatch.setattr(pm._ranks, "call_seconds", 0.5)  # as if each call had taken so long
    mixed = training_loader(pm, data, 40, grad_accum_steps=k, mixup=Mixup(10, mixup=0.5))
    seen = Seen()
    Trainer(pm, mixed, epochs=2, grad_accum_steps=k, callbacks=(seen,)).fit()
    assert seen.rates == [40 / (0.5 * k)] * 4


class Seen(Callback):
    """Images per second of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step(self, trainer: autopar.train.TrainerView, report: StepReport) -> None:
        self.rates.append(report.samples_per_second)


def test_a_loader_of_the_users_own(data: Data):
    x, y = torch.randn(50, 1, 8, 8), torch.randint(10, (50,))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    record = Record()
    with parallel(16) as pm:
        history = Trainer(pm, loader, loader, epochs=2, callbacks=(record,)).fit()
    assert record.calls.count("step 2.4") == 1 and len(history) == 2
    assert history[1].loss < history[0].loss


def test_averaged_weights_decide_what_is_best(data: Data):
    with parallel(ema=Averaged) as pm:
        history = trainer(pm, data, ema=True).fit()
    assert history[0].score == history[0].ema_accuracy and history[0].best
    assert history[1].score == history[0].score and not history[1].best  # the average stayed


class Averaged:
    """Keeps the first weights it saw."""

    def __init__(self, module: nn.Module) -> None:
        import copy

        self.module = copy.deepcopy(module)

    def update(self, module: nn.Module, step: int) -> None:
        """The average stays."""


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation_counts_ragged_batches_and_leaves_out_what_fills_them():
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    scores = torch.eye(7)[labels] + torch.linspace(0, 0.1, 7)
    scores[4] = scores[3]
    whole = mean_scores(score_sums(scores, labels))
    assert (whole.right, whole.samples, whole.accuracy) == (5, 6, 5 / 6)
    assert whole.loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item())
    batches = [Batch(scores[:4], labels[:4], 4), Batch(scores[4:], labels[4:], 1), Batch(scores[5:], labels[5:], 1)]
    assert evaluate_alone(lambda x: x, batches).samples == 6
    assert evaluate_alone(lambda x: x, batches).loss == pytest.approx(whole.loss)
    assert evaluate_alone(lambda x: x, [*batches, Batch(scores[:1], labels[:1], 0)]).right == 5


def test_top5_is_told_apart():
    scores = torch.arange(8.0).expand(8, 8)
    top = mean_scores(score_sums(scores, torch.arange(8)))
    assert (top.accuracy, top.top5) == (1 / 8, 5 / 8)


def test_outputs_that_are_no_scores(data: Data):
    with (
        autopar.parallelize(nn.Flatten(0), 1, torch.empty(16, 1, 8, 8)) as pm,
        pytest.raises(
            UsageError, match=r"output is of shape \[1024\]; its accuracy needs scores of \[batch, classes\]"
        ),
    ):
        evaluate(pm, evaluation_loader(data, 16, pm).epoch(1))


def test_what_a_process_has_to_read(data: Data):
    with parallel() as pm:
        assert pm.needs_inputs and pm.needs_targets and pm.data_sum([1, 2.5]) == [1, 2.5]
        x, y = torch.empty(20, 1, 8, 8), torch.zeros(20, dtype=torch.int64)
        message = r"Rank 0 was given {0}s on the meta device, .* Pass real ones where pm\.needs_{0}s is true"
        with pytest.raises(UsageError, match=message.format("input")):
            pm(x.to("meta"))
        with pytest.raises(UsageError, match=message.format("target")):
            pm.train_step(x, y.to("meta"))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


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


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(data: Data, tmp_path: Path):
    record = Record()
    with parallel() as pm:
        poisoned = Poisoned(training_loader(pm, data, 20, augmentation=Augmentation()))
        run = Trainer(pm, poisoned, epochs=3, callbacks=(Checkpoints(tmp_path), record))
        message = (
            rf"The loss became (nan|inf) in epoch 2, step 3 of 5, at a .* last checkpoint is {tmp_path}/last\. Use"
        )
        with pytest.raises(TrainingError, match=message):
            run.fit()
    assert record.calls[-3:] == ["step 2.1", "step 2.2", "end"]
    with parallel() as pm:
        again = Trainer(pm, training_loader(pm, data, 20), epochs=3)
        again.resume(tmp_path / "last")
        assert again.position.epoch == 2 and len(again.history) == 1


def test_numbers_out_of_range(data: Data):
    with parallel() as pm:
        loader = training_loader(pm, data, 20)
        with pytest.raises(UsageError, match="epochs=0 and grad_accum_steps=1 must be at least 1"):
            Trainer(pm, loader, epochs=0)
        with pytest.raises(UsageError, match="An epoch has 5 batches, an update takes grad_accum_steps=6"):
            Trainer(pm, loader, epochs=1, grad_accum_steps=6)
        with pytest.raises(UsageError, match="A batch of 20 cannot be accumulated in 3 equal steps"):
            training_loader(pm, data, 20, grad_accum_steps=3)
        with pytest.raises(UsageError, match="A batch of 200 is more than the 100 training images"):
            training_loader(pm, data, 200)


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [3, 7])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(interrupted: int, data: Data, tmp_path: Path):
    make = schedule("cosine", 3, 5, warmup_epochs=1, step_on_epochs=False)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with parallel(lr_scheduler=make) as pm:
        expected = trainer(pm, data, epochs=3, schedule="timm", callbacks=(JsonLog(whole),)).fit()
        state = pm.state_dict()
    callbacks = (JsonLog(cut), Checkpoints(cut, every=2), Record(fail_at=interrupted))
    with parallel(lr_scheduler=make) as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, data, epochs=3, schedule="timm", callbacks=callbacks).fit()
    assert len(losses(cut)) == interrupted
    with (cut / "steps.jsonl").open("a") as file:
        file.write('{"epo')  # as a killed process may leave it
    with parallel(lr_scheduler=make) as pm:
        again = trainer(pm, data, epochs=3, schedule="timm", callbacks=callbacks[:2])
        again.resume(cut / "last")
        assert again.position.update == interrupted - 1
        history = again.fit()
        assert all(torch.equal(t, state[name]) for name, t in pm.state_dict().items())
    assert losses(cut) == losses(whole)
    assert [s["lr"] for s in lines(cut / "steps.jsonl")] == [s["lr"] for s in lines(whole / "steps.jsonl")]
    assert [h.accuracy for h in history] == [h.accuracy for h in expected]
    assert [h.loss for h in history] == pytest.approx([h.loss for h in expected], abs=1e-12)


class Noisy(nn.Sequential):
    """Drops out in evaluation too, so that what an evaluation drew decides on what comes after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, training=True)


class Signal:
    """A loader that has Ctrl-C pressed after so many batches of all epochs, counted from 0."""

    def __init__(self, inner, at: int) -> None:
        self.inner, self.left = inner, at

    def __len__(self) -> int:
        return len(self.inner)

    def epoch(self, number: int, first: int = 0):
        for batch in self.inner.epoch(number, first):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            self.left -= 1
            yield batch


class Pressed(Callback):
    """Ctrl-C is pressed when the first epoch is told."""

    def on_epoch(self, trainer: autopar.train.TrainerView, report) -> None:
        if report.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)


NEVER = 99


# An epoch has 5 updates, and 8 batches of evaluation: 4 of the weights and 4 of the averages.
@pytest.mark.parametrize(
    ("training", "testing", "pressed", "where"),
    [
        (2, NEVER, (), (1, 3)),
        (4, NEVER, (), (1, 5)),
        (NEVER, 2, (), (1, 5)),
        (NEVER, 13, (), (2, 5)),
        (NEVER, NEVER, (Pressed(),), (2, 0)),
    ],
)
def test_ctrl_c_saves_where_the_run_stands(
    training: int, testing: int, pressed: tuple[Callback, ...], where: tuple[int, int], data: Data, tmp_path: Path
):
    make = schedule("cosine", 2, 5, warmup_epochs=1, step_on_epochs=False)
    ema = functools.partial(ModelEmaV3, decay=0.5)
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def model() -> autopar.ParallelModel:
        torch.manual_seed(0)
        noisy = Noisy(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
        return autopar.parallelize(
            noisy, 1, torch.empty(20, 1, 8, 8), optimizer=ADAMW, lr_scheduler=make, ema=ema, microbatches=1
        )

    def run(pm: autopar.ParallelModel, folder: Path, *more: Callback) -> Trainer:
        callbacks = (*more, JsonLog(folder), Checkpoints(folder))
        return trainer(pm, data, schedule="timm", ema=True, callbacks=callbacks)

    with model() as pm:
        expected, state = run(pm, whole).fit(), pm.state_dict()
    record = Record()
    with model() as pm:
        interrupted = run(pm, cut, *pressed, record)
        assert interrupted.eval_loader is not None
        interrupted.train_loader = Signal(interrupted.train_loader, training)
        interrupted.eval_loader = Signal(interrupted.eval_loader, testing)
        with pytest.raises(KeyboardInterrupt):
            interrupted.fit()
        assert (interrupted.position.epoch, interrupted.position.step) == where
        assert interrupted.saved == interrupted.position and interrupted.checkpoint == cut / "last"
    assert record.calls[-2:] == ["last", "end"] and record.calls.count("last") == max(1, where[0] - (where[1] == 0))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with model() as pm:
        again = run(pm, cut)
        again.resume(cut / "last")
        assert (again.position.epoch, again.position.step) == where
        history = again.fit()
        assert all(torch.equal(t, state[name]) for name, t in pm.state_dict().items())
    assert losses(cut) == losses(whole)
    assert [(h.loss, h.accuracy, h.ema_accuracy) for h in history] == [
        (pytest.approx(h.loss, abs=1e-12), h.accuracy, h.ema_accuracy) for h in expected
    ]
    assert [line["epoch"] for line in lines(cut / "history.jsonl")] == [1, 2]


class Twice(Callback):
    """Ctrl-C is pressed twice during the second update."""

    def on_step(self, trainer: autopar.train.TrainerView, report) -> None:
        if report.update == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")


def test_a_second_ctrl_c_ends_at_once(data: Data, tmp_path: Path):
    with parallel() as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, data, callbacks=(Twice(), Checkpoints(tmp_path))).fit()
    assert list(tmp_path.iterdir()) == []


def test_a_handler_of_the_callers_own_stays():
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with deferred_interrupts() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        assert (heard, interrupt.requested) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_goes_on_in_another_folder(data: Data, tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    callbacks = (JsonLog(old), Checkpoints(old, every=2), Record(fail_at=7))
    with parallel() as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, data, callbacks=callbacks).fit()
    assert len(losses(old)) == 7
    with parallel() as pm:
        on = trainer(pm, data, callbacks=(JsonLog(new), Checkpoints(new), Record(fail_at=7)))
        on.resume(old / "last")
        with pytest.raises(KeyboardInterrupt):
            on.fit()
        assert on.checkpoint == new / "last" and on.saved == RunPosition(2, 1, 5)
    assert losses(new) == losses(old) and lines(new / "history.jsonl") == lines(old / "history.jsonl")
    assert read_run(new / "last") == read_run(old / "last") and read_run(new / "best").position == RunPosition(2, 0, 5)
    with parallel() as pm:  # from the start of the new folder, as if the old one were gone
        again = trainer(pm, data, callbacks=(JsonLog(new), Checkpoints(new)))
        again.resume(new / "last")
        again.fit()
    assert [line["update"] for line in lines(new / "steps.jsonl")] == [*range(1, 11)]


FOUND = "holds a run already: "


def test_another_run_is_refused_where_a_log_has_lines(data: Data, tmp_path: Path):
    with parallel() as pm:
        trainer(pm, data, epochs=1, callbacks=(JsonLog(tmp_path),)).fit()
    before = contents(tmp_path)
    told = f"{tmp_path} {FOUND}steps.jsonl of 5 updates, history.jsonl of 1 epoch. It has no checkpoint to go on from: "
    with parallel() as pm:
        record = Record()
        message = re.escape(f"{told}take another folder, or remove it first with autopar.train.remove_run(Path(")
        with pytest.raises(UsageError, match=message):
            trainer(pm, data, callbacks=(record, JsonLog(tmp_path))).fit()
        assert record.calls == ["start", "end"] and contents(tmp_path) == before
        remove_run(tmp_path)
        assert list(tmp_path.iterdir()) == []
        trainer(pm, data, callbacks=(JsonLog(tmp_path),)).fit()
    assert len(losses(tmp_path)) == 10


@pytest.mark.parametrize("goes_on", [False, True])
def test_another_run_is_refused_where_checkpoints_are(goes_on: bool, data: Data, tmp_path: Path):
    """Also one that goes on from another folder, and is not to replace a third run."""
    old, there = tmp_path / "old", tmp_path / "there"
    for folder in (old, there):
        with parallel() as pm:
            trainer(pm, data, epochs=1, callbacks=(Checkpoints(folder),)).fit()
    before = contents(there)
    with parallel() as pm:
        run = trainer(pm, data, callbacks=(JsonLog(there), Checkpoints(there)))
        if goes_on:
            run.resume(old / "last")
        message = re.escape(
            f"{there} {FOUND}checkpoint last after 5 updates, checkpoint best after 5 updates. "
            f'Go on with it by trainer.resume("{there / "last"}"), take another folder, or '
        )
        with pytest.raises(UsageError, match=message):
            run.fit()
    assert contents(there) == before


def test_what_a_run_that_failed_at_its_start_leaves_is_used(data: Data, tmp_path: Path):
    for name in ("steps.jsonl", "history.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "last" / "data-1").mkdir(parents=True)  # a killed save
    with parallel() as pm:
        trainer(pm, data, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path))).fit()
    assert len(losses(tmp_path)) == 10 and is_checkpoint(tmp_path / "last")


def test_a_trainer_goes_on_with_what_it_began(data: Data, tmp_path: Path):
    """In the folder of its own checkpoints, and in another one than that which it went on from."""
    old, new = tmp_path / "old", tmp_path / "new"
    with parallel() as pm:
        run = trainer(pm, data, epochs=1, callbacks=(JsonLog(old), Checkpoints(old)))
        run.fit()
        run.epochs = 2
        assert len(run.fit()) == 2
    assert [line["update"] for line in lines(old / "steps.jsonl")] == [*range(1, 11)]
    with parallel() as pm:
        on = trainer(pm, data, epochs=3, callbacks=(JsonLog(new), Checkpoints(new)))
        on.resume(old / "last")
        on.fit()
        on.epochs = 4
        on.fit()
    assert [line["update"] for line in lines(new / "steps.jsonl")] == [*range(1, 21)]
    assert [line["epoch"] for line in lines(new / "history.jsonl")] == [1, 2, 3, 4]


def test_a_run_goes_on_by_a_link_and_from_within_its_checkpoint(data: Data, tmp_path: Path, monkeypatch):
    folder = tmp_path / "run"
    with parallel() as pm:
        trainer(pm, data, epochs=1, callbacks=(JsonLog(folder), Checkpoints(folder))).fit()
    (tmp_path / "link").symlink_to(folder / "last")
    monkeypatch.chdir(folder / "last")
    for epochs, checkpoint in ((2, tmp_path / "link"), (3, Path())):
        with parallel() as pm:
            on = trainer(pm, data, epochs=epochs, callbacks=(JsonLog(folder), Checkpoints(folder)))
            on.resume(checkpoint)
            on.fit()
        assert [line["update"] for line in lines(folder / "steps.jsonl")] == [*range(1, 5 * epochs + 1)]


def test_a_run_is_removed_and_nothing_else(data: Data, tmp_path: Path):
    run = tmp_path / "run"
    with parallel() as pm:
        callbacks = (JsonLog(run), TensorBoard(run / "tensorboard"), TensorBoard(run), Checkpoints(run))
        trainer(pm, data, epochs=1, callbacks=callbacks).fit()
        for name in ("model.safetensors", "model_ema.safetensors"):
            save_weights(pm.state_dict(), run / name)
    theirs = [run / "notes.txt", run / "best" / "notes.txt", run / "tensorboard" / "notes.txt", run / "last.json"]
    for path in theirs:
        path.write_text("mine")
    remove_run(run)
    assert sorted(contents(run)) == sorted(theirs) and not (run / "last").exists()
    remove_run(run)
    remove_run(tmp_path / "none")
    assert sorted(contents(run)) == sorted(theirs)


def test_a_checkpoint_that_is_being_saved_is_not_removed(data: Data, tmp_path: Path):
    with parallel() as pm:
        trainer(pm, data, epochs=1, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path))).fit()
    before = contents(tmp_path)
    with (tmp_path / "last" / ".saving").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"Another process is saving a checkpoint to .*last at this moment"):
            remove_run(tmp_path)
    assert contents(tmp_path) == before


def test_the_best_of_a_later_time_is_not_taken_over(data: Data, tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    with parallel() as pm:
        trainer(pm, data, epochs=1, callbacks=(Checkpoints(old),)).fit()
    run = read_run(old / "best")
    with parallel() as pm:
        on = trainer(pm, data, epochs=1, callbacks=(Checkpoints(new),))
        on.resume(old / "last")
        on.best = (run.best or 0) / 2  # as if best had been saved after last
        on.fit()
    assert is_checkpoint(new / "last") and not is_checkpoint(new / "best")


def test_a_run_with_other_settings_is_not_resumed(data: Data, tmp_path: Path):
    with parallel() as pm:
        trainer(pm, data, epochs=1, settings={"seed": 0, "side": (8, 8)}).save(tmp_path / "c")
        trainer(pm, data, settings={"seed": 0, "side": (8, 8)}).resume(tmp_path / "c")
        message = r"cannot be resumed so: this would change seed from 0 to 2, lr from None to 1\. That would be another"
        with pytest.raises(UsageError, match=message):
            trainer(pm, data, settings={"seed": 2, "side": (8, 8), "lr": 1}).resume(tmp_path / "c")
        with pytest.raises(UsageError, match=r"is of epochs of 5 updates, now they have 10\. Use the"):
            trainer(pm, data, batch=10, settings={"seed": 0, "side": (8, 8)}).resume(tmp_path / "c")
        pm.save_checkpoint(tmp_path / "plain", extra={"mine": 1})
        with pytest.raises(UsageError, match="does not say how far a training was, because no Trainer wrote it"):
            trainer(pm, data).resume(tmp_path / "plain")


# -- weights on disk ---------------------------------------------------------------------------------------------------


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_weights_survive_the_file(tmp_path: Path):
    model, fresh = TiedHead(), TiedHead()
    save_weights(model.state_dict(), tmp_path / "w.safetensors")
    load_weights(fresh, tmp_path / "w.safetensors")
    assert torch.equal(fresh.second.weight, model.first.weight) and not fresh.training


def test_a_file_that_cannot_be_written_is_not_left_behind(tmp_path: Path):
    with pytest.raises(TypeError):
        save_weights({"w": torch.zeros(2)}, tmp_path / "w.safetensors", {"updates": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
