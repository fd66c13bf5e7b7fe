"""Run folders: one that holds another run is refused; a run is removed and nothing else."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

import pytest
from support.train_cli import contents, losses
from support.training import Record, parallel, trainer

from autopar.errors import CheckpointError, UsageError
from autopar.runtime.checkpoint.folder import is_checkpoint
from autopar.train import (
    Checkpoints,
    JsonLog,
    TensorBoard,
    remove_run,
    save_weights,
)

FOUND = "holds a run already: "


def test_another_run_is_refused_where_a_log_has_lines(tmp_path: Path):
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(JsonLog(tmp_path),)).fit()
    before = contents(tmp_path)
    told = f"{tmp_path} {FOUND}steps.jsonl of 5 updates, history.jsonl of 1 epoch. It has no checkpoint to go on from: "
    with parallel() as pm:
        record = Record()
        message = re.escape(f"{told}take another folder, or remove it first with autopar.train.remove_run(Path(")
        with pytest.raises(UsageError, match=message):
            trainer(pm, callbacks=(record, JsonLog(tmp_path))).fit()
        assert record.calls == ["start", "end"] and contents(tmp_path) == before
        remove_run(tmp_path)
        assert list(tmp_path.iterdir()) == []
        trainer(pm, callbacks=(JsonLog(tmp_path),)).fit()
    assert len(losses(tmp_path)) == 10


@pytest.mark.parametrize("goes_on", [False, True])
def test_another_run_is_refused_where_checkpoints_are(goes_on: bool, tmp_path: Path):
    """Even a run that was resumed from another folder must not replace a third run."""
    old, there = tmp_path / "old", tmp_path / "there"
    for folder in (old, there):
        with parallel() as pm:
            trainer(pm, epochs=1, callbacks=(Checkpoints(folder),)).fit()
    before = contents(there)
    with parallel() as pm:
        run = trainer(pm, callbacks=(JsonLog(there), Checkpoints(there)))
        if goes_on:
            run.resume(old / "last")
        message = re.escape(
            f"{there} {FOUND}checkpoint last after 5 updates, checkpoint best after 5 updates. "
            f'Go on with it by trainer.resume("{there / "last"}"), take another folder, or '
        )
        with pytest.raises(UsageError, match=message):
            run.fit()
    assert contents(there) == before


def test_what_a_run_that_failed_at_its_start_leaves_is_used(tmp_path: Path):
    for name in ("steps.jsonl", "history.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "last" / "data-1").mkdir(parents=True)  # a killed save
    with parallel() as pm:
        trainer(pm, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path))).fit()
    assert len(losses(tmp_path)) == 10 and is_checkpoint(tmp_path / "last")


def test_a_run_is_removed_and_nothing_else(tmp_path: Path):
    run = tmp_path / "run"
    with parallel() as pm:
        callbacks = (JsonLog(run), TensorBoard(run / "tensorboard"), TensorBoard(run), Checkpoints(run))
        trainer(pm, epochs=1, callbacks=callbacks).fit()
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


def test_a_checkpoint_that_is_being_saved_is_not_removed(tmp_path: Path):
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path))).fit()
    before = contents(tmp_path)
    with (tmp_path / "last" / ".saving").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"Another process is saving a checkpoint to .*last at this moment"):
            remove_run(tmp_path)
    assert contents(tmp_path) == before
