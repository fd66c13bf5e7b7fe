"""Callbacks: the order of their hooks, logs, TensorBoard, checkpoints and the progress bar."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.train_cli import records
from support.training import Record, digits, parallel, trainer

from autopar.train import (
    Checkpoints,
    JsonLog,
    ProgressBar,
    TensorBoard,
    evaluate,
    evaluation_loader,
    schedule,
)
from autopar.train.run.reports import RunPosition


def test_hooks_log_tensorboard_and_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture):
    record = Record()
    make = schedule("cosine", 2, 5, warmup_epochs=0)
    with parallel(lr_scheduler=make) as pm:
        callbacks = (
            record, JsonLog(tmp_path), TensorBoard(tmp_path / "tb"), Checkpoints(tmp_path, every=3), ProgressBar(),
        )  # fmt: skip
        history = trainer(pm, schedule="timm", callbacks=callbacks).fit()
        scored = evaluate(pm, evaluation_loader(digits(), 16, pm).epoch(1))
    steps, epochs = records(tmp_path / "steps.jsonl"), records(tmp_path / "history.jsonl")
    assert [(s["epoch"], s["step"], s["update"]) for s in steps] == [(1 + i // 5, 1 + i % 5, 1 + i) for i in range(10)]
    assert [s["lr"] for s in steps] == [3e-3] * 5 + [pytest.approx(1.5e-3)] * 5
    assert [e["epoch"] for e in epochs] == [1, 2] and [e["update"] for e in epochs] == [5, 10]
    assert epochs[0]["loss"] == pytest.approx(sum(s["loss"] for s in steps[:5]) / 5)
    assert epochs[1]["accuracy"] == history[1].accuracy == scored.accuracy
    assert epochs[1]["test_loss"] == pytest.approx(scored.loss) and epochs[1]["top5"] == scored.top5 > scored.accuracy
    assert all(s["samples_per_second"] > 0 and not s["skipped"] for s in steps)
    peaks = [s["peak_bytes"] for s in steps]
    assert peaks[0] >= 0 and peaks == sorted(peaks)
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


def test_a_run_says_that_its_first_step_compiles(capsys: pytest.CaptureFixture) -> None:
    for compiled in (False, True):
        machine, position = SimpleNamespace(device_type="cpu"), RunPosition(1, 0, 5)
        pm: Any = SimpleNamespace(compiled=compiled, machine=machine)
        view: Any = SimpleNamespace(pm=pm, epochs=3, position=position, history=[])
        ProgressBar().on_start(view)
        assert capsys.readouterr().out == ("epoch 1/3  the first step compiles the model\n" if compiled else "")


def tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
