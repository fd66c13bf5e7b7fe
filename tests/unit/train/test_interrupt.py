"""Ctrl-C and SIGTERM during training: the run saves where it stands, and can be resumed."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train_cli import losses, records
from support.training import ADAMW, Record, parallel, trainer
from timm.utils import ModelEmaV3
from torch import nn

import autopar
from autopar.train import (
    Callback,
    Checkpoints,
    JsonLog,
    Trainer,
    schedule,
)
from autopar.train.run.interrupt import deferred_interrupts, exits_on_sigterm


class Noisy(nn.Sequential):
    """Drops out in evaluation too, so that what an evaluation drew decides on what comes after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, training=True)


class Signal:
    """A loader that has Ctrl-C pressed, or is broken, after so many batches of all epochs, counted from 0."""

    def __init__(self, inner, at: int, broken: bool) -> None:
        self.inner, self.left, self.broken = inner, at, broken

    def __len__(self) -> int:
        return len(self.inner)

    def epoch(self, number: int, first: int = 0):
        for batch in self.inner.epoch(number, first):
            if self.left == 0:
                if self.broken:
                    raise autopar.UnreadableDataError("Cannot read image 7.")
                os.kill(os.getpid(), signal.SIGINT)
            self.left -= 1
            yield batch


class Pressed(Callback):
    """Press Ctrl-C when the first epoch is reported."""

    def on_epoch(self, trainer: autopar.train.TrainerView, report) -> None:
        if report.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)


NEVER = 99


# An epoch has 5 updates, and 8 batches of evaluation: 4 of the weights and 4 of the averages.
@pytest.mark.parametrize(
    ("training", "testing", "pressed", "broken", "where"),
    [
        (2, NEVER, (), False, (1, 3)),
        (4, NEVER, (), False, (1, 5)),
        (NEVER, 2, (), False, (1, 5)),
        (NEVER, 13, (), False, (2, 5)),
        (NEVER, NEVER, (Pressed(),), False, (2, 0)),
        (2, NEVER, (), True, (1, 2)),
        (5, NEVER, (), True, (2, 0)),
        (NEVER, 2, (), True, (1, 5)),
        (NEVER, 13, (), True, (2, 5)),
    ],
)
def test_ctrl_c_and_an_unreadable_image_save_where_the_run_stands(
    training: int, testing: int, pressed: tuple[Callback, ...], broken: bool, where: tuple[int, int], tmp_path: Path
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
        return trainer(pm, schedule="timm", ema=True, callbacks=callbacks)

    with model() as pm:
        expected, state = run(pm, whole).fit(), pm.state_dict()
    record = Record()
    with model() as pm:
        interrupted = run(pm, cut, *pressed, record)
        assert interrupted.eval_loader is not None
        interrupted.train_loader = Signal(interrupted.train_loader, training, broken)
        interrupted.eval_loader = Signal(interrupted.eval_loader, testing, broken)
        with pytest.raises(autopar.UnreadableDataError if broken else KeyboardInterrupt) as ended:
            interrupted.fit()
        saved = f"Cannot read image 7. The training until then is saved in {cut / 'last'}."
        assert not broken or str(ended.value) == saved
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
    assert [line["epoch"] for line in records(cut / "history.jsonl")] == [1, 2]


class Twice(Callback):
    """Ctrl-C is pressed twice during the second update."""

    def on_step(self, trainer: autopar.train.TrainerView, report) -> None:
        if report.update == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path):
    with parallel() as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, callbacks=(Twice(), Checkpoints(tmp_path))).fit()
    assert list(tmp_path.iterdir()) == []


class Terminated(Callback):
    """SIGTERM arrives twice during the second update: from a job manager and from a launcher."""

    def on_step(self, trainer: autopar.train.TrainerView, report) -> None:
        if report.update == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_and_exits(tmp_path: Path):
    with parallel() as pm:
        run = trainer(pm, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path), Terminated()))
        with pytest.raises(SystemExit) as ended:
            run.fit()
        assert ended.value.code == 143
        assert run.saved == run.position and run.position.update == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with parallel() as pm:
        again = trainer(pm, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path)))
        assert again.resume_or_start(tmp_path) == tmp_path / "last"
        assert len(again.fit()) == 2
    assert len(losses(tmp_path)) == 10


def test_a_later_second_sigterm_ends_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.train.run.interrupt.REPEAT_SECONDS", 0.0)
    with parallel() as pm, pytest.raises(SystemExit) as ended:
        trainer(pm, callbacks=(Terminated(), Checkpoints(tmp_path))).fit()
    assert ended.value.code == 143 and list(tmp_path.iterdir()) == []


def sleep_after(started: Any) -> None:
    started.send(None)
    time.sleep(60)


def test_a_fork_ends_when_it_is_terminated():
    """multiprocessing terminates its processes, which have the handlers of the process that they were forked from."""
    with deferred_interrupts() as interrupt:
        ready, started = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=sleep_after, args=(started,))
        process.start()
        ready.recv()  # before, Python in the child drops signals
        process.terminate()
        process.join(30)
        assert process.exitcode == 143 and not interrupt.requested


def test_sigterm_before_and_after_the_training_loop():
    with pytest.raises(SystemExit) as ended, exits_on_sigterm():
        with deferred_interrupts() as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.terminated
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_callers_own_stays(number: signal.Signals):
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with deferred_interrupts() as interrupt:
            os.kill(os.getpid(), number)
        assert (heard, interrupt.requested) == ([number], False)
    finally:
        signal.signal(number, before)
