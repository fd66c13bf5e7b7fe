"""Run folders: one that holds another run is refused; a run is removed and nothing else."""

from __future__ import annotations

import fcntl
import re
import shutil
from pathlib import Path

import pytest
from support.train_cli import contents, losses
from support.training import Record, parallel, trainer

from autopar.errors import CheckpointError, ResumeWarning, UsageError
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


# -- scripts that are restarted ----------------------------------------------------------------------------------------


def restarted(folder: Path, epochs: int = 1) -> Path | None:
    """Checkpoint from which a script goes on that is started again; it then trains to its end."""
    with parallel() as pm:
        run = trainer(pm, epochs=epochs, callbacks=(JsonLog(folder), Checkpoints(folder)))
        checkpoint = run.resume_or_start(folder)
        run.fit()
    return checkpoint


def test_a_script_starts_goes_on_and_has_finished(tmp_path: Path):
    run = tmp_path / "run"
    assert restarted(run) is None
    assert restarted(run, epochs=2) == run / "last"
    assert len(losses(run)) == 10
    before = contents(run)
    assert restarted(run, epochs=2) == run / "last"
    assert contents(run) == before


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path):
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(JsonLog(tmp_path),)).fit()
    (tmp_path / "last" / "data-1").mkdir(parents=True)  # a killed save
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.warns(ResumeWarning, match=r"ended before its first .* replaces steps\.jsonl of 5 updates, h"):
        assert restarted(tmp_path) is None
    assert len(losses(tmp_path)) == 5 and (tmp_path / "notes.txt").exists()


def test_a_run_that_ended_before_its_first_last_goes_on_from_best(tmp_path: Path):
    restarted(tmp_path)
    shutil.rmtree(tmp_path / "last")
    assert restarted(tmp_path) == tmp_path / "best"


def test_no_checkpoint_is_chosen_for_a_damaged_one(tmp_path: Path):
    restarted(tmp_path)
    header = tmp_path / "last" / "checkpoint.json"
    text = header.read_text()
    header.write_text(text[:40])
    with pytest.raises(
        CheckpointError, match=r"last/checkpoint\.json is not .* /.*/best is whole, after 5 updates: re"
    ):
        restarted(tmp_path)
    (tmp_path / "best" / "checkpoint.json").write_text("")
    with pytest.raises(CheckpointError, match=r"last/checkpoint\.json is not a complete JSON file.*") as error:
        restarted(tmp_path)
    assert "best" not in str(error.value)
    (data,) = (tmp_path / "last").glob("data-*")
    header.rename(data / header.name)
    with pytest.raises(CheckpointError, match=rf"last has lost its checkpoint\.json, but {data} has one"):
        restarted(tmp_path)
    assert (data / header.name).exists()


def test_weights_without_a_checkpoint_stay(tmp_path: Path):
    save_weights({}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"holds a run .*: model\.safetensors\. It has no checkpoint to go on from"):
        restarted(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
