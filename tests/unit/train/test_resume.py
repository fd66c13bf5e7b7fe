"""Training resumed from a checkpoint equals training without a break."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.train_cli import losses, records
from support.training import Record, parallel, trainer

from autopar.errors import UsageError
from autopar.runtime.checkpoint.folder import is_checkpoint
from autopar.train import (
    Checkpoints,
    JsonLog,
    read_run,
    remove_run,
    schedule,
)
from autopar.train.run.reports import RunPosition


@pytest.mark.parametrize("interrupted", [3, 7])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(interrupted: int, tmp_path: Path):
    make = schedule("cosine", 3, 5, warmup_epochs=1, step_on_epochs=False)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with parallel(lr_scheduler=make) as pm:
        expected = trainer(pm, epochs=3, schedule="timm", callbacks=(JsonLog(whole),)).fit()
        state = pm.state_dict()
    callbacks = (JsonLog(cut), Checkpoints(cut, every=2), Record(fail_at=interrupted))
    with parallel(lr_scheduler=make) as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, epochs=3, schedule="timm", callbacks=callbacks).fit()
    assert len(losses(cut)) == interrupted
    with (cut / "steps.jsonl").open("a") as file:
        file.write('{"epo')  # as a killed process may leave it
    with parallel(lr_scheduler=make) as pm:
        again = trainer(pm, epochs=3, schedule="timm", callbacks=callbacks[:2])
        again.resume(cut / "last")
        assert again.position.update == interrupted - 1
        history = again.fit()
        assert all(torch.equal(t, state[name]) for name, t in pm.state_dict().items())
    assert losses(cut) == losses(whole)
    assert [s["lr"] for s in records(cut / "steps.jsonl")] == [s["lr"] for s in records(whole / "steps.jsonl")]
    assert [h.accuracy for h in history] == [h.accuracy for h in expected]
    assert [h.loss for h in history] == pytest.approx([h.loss for h in expected], abs=1e-12)


def test_a_run_goes_on_in_another_folder(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    callbacks = (JsonLog(old), Checkpoints(old, every=2), Record(fail_at=7))
    with parallel() as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, callbacks=callbacks).fit()
    assert len(losses(old)) == 7
    with parallel() as pm:
        on = trainer(pm, callbacks=(JsonLog(new), Checkpoints(new), Record(fail_at=7)))
        on.resume(old / "last")
        with pytest.raises(KeyboardInterrupt):
            on.fit()
        assert on.checkpoint == new / "last" and on.saved == RunPosition(2, 1, 5)
    assert losses(new) == losses(old) and records(new / "history.jsonl") == records(old / "history.jsonl")
    assert read_run(new / "last") == read_run(old / "last") and read_run(new / "best").position == RunPosition(2, 0, 5)
    with parallel() as pm:  # from the start of the new folder, as if the old one were gone
        again = trainer(pm, callbacks=(JsonLog(new), Checkpoints(new)))
        again.resume(new / "last")
        again.fit()
    assert [line["update"] for line in records(new / "steps.jsonl")] == [*range(1, 11)]


def test_a_trainer_goes_on_with_what_it_began(tmp_path: Path):
    """A resumed run writes to the folder of its checkpoints, or to a new one."""
    old, new = tmp_path / "old", tmp_path / "new"
    with parallel() as pm:
        run = trainer(pm, epochs=1, callbacks=(JsonLog(old), Checkpoints(old)))
        run.fit()
        run.epochs = 2
        assert len(run.fit()) == 2
    assert [line["update"] for line in records(old / "steps.jsonl")] == [*range(1, 11)]
    with parallel() as pm:
        on = trainer(pm, epochs=3, callbacks=(JsonLog(new), Checkpoints(new)))
        on.resume(old / "last")
        on.fit()
        on.epochs = 4
        on.fit()
    assert [line["update"] for line in records(new / "steps.jsonl")] == [*range(1, 21)]
    assert [line["epoch"] for line in records(new / "history.jsonl")] == [1, 2, 3, 4]


def test_a_run_goes_on_by_a_link_and_from_within_its_checkpoint(tmp_path: Path, monkeypatch):
    folder = tmp_path / "run"
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(JsonLog(folder), Checkpoints(folder))).fit()
    (tmp_path / "link").symlink_to(folder / "last")
    monkeypatch.chdir(folder / "last")
    for epochs, checkpoint in ((2, tmp_path / "link"), (3, Path())):
        with parallel() as pm:
            on = trainer(pm, epochs=epochs, callbacks=(JsonLog(folder), Checkpoints(folder)))
            on.resume(checkpoint)
            on.fit()
        assert [line["update"] for line in records(folder / "steps.jsonl")] == [*range(1, 5 * epochs + 1)]


def test_a_run_goes_on_from_an_older_checkpoint_that_is_kept(tmp_path: Path):
    """In the folder of its run, as if the newer ones did not exist."""
    folder, new = tmp_path / "run", tmp_path / "new"
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(JsonLog(folder), Checkpoints(folder, every=2, keep=3))).fit()
        state = pm.state_dict()
    assert [path.name for path in sorted((folder / "last").glob("data-*"))] == ["data-1", "data-2", "data-3"]
    for target in (new, folder):
        with parallel() as pm:
            on = trainer(pm, epochs=1, callbacks=(JsonLog(target), Checkpoints(target)))
            on.resume(folder / "last" / "data-1")
            assert on.position.update == 2
            on.fit()
            assert all(torch.equal(t, state[name]) for name, t in pm.state_dict().items())
        assert [line["update"] for line in records(target / "steps.jsonl")] == [*range(1, 6)]
        assert [path.name for path in (target / "last").glob("data-*")] == ["data-2" if target == new else "data-4"]
    remove_run(folder)
    assert list(folder.iterdir()) == []


def test_a_kill_while_a_log_is_rewritten_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(JsonLog(tmp_path), Checkpoints(tmp_path, every=2))).fit()
        before = losses(tmp_path)
        on = trainer(pm, callbacks=(JsonLog(tmp_path),))
        on.resume(tmp_path / "last")

        def killed(path: Path, text: str) -> int:
            with path.open("w"):
                raise KeyboardInterrupt

        monkeypatch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            on.fit()
    assert losses(tmp_path) == before


def test_the_best_of_a_later_time_is_not_taken_over(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=(Checkpoints(old),)).fit()
    run = read_run(old / "best")
    with parallel() as pm:
        on = trainer(pm, epochs=1, callbacks=(Checkpoints(new),))
        on.resume(old / "last")
        on.best = (run.best or 0) / 2  # as if best had been saved after last
        on.fit()
    assert is_checkpoint(new / "last") and not is_checkpoint(new / "best")


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path):
    with parallel() as pm:
        trainer(pm, epochs=1, settings={"seed": 0, "side": (8, 8)}).save(tmp_path / "c")
        trainer(pm, settings={"seed": 0, "side": (8, 8)}).resume(tmp_path / "c")
        message = r"cannot be resumed so: this would change seed from 0 to 2, lr from None to 1\. That would be another"
        with pytest.raises(UsageError, match=message):
            trainer(pm, settings={"seed": 2, "side": (8, 8), "lr": 1}).resume(tmp_path / "c")
        with pytest.raises(UsageError, match=r"is of epochs of 5 updates, now they have 10\. Use the"):
            trainer(pm, batch=10, settings={"seed": 0, "side": (8, 8)}).resume(tmp_path / "c")
        pm.save_checkpoint(tmp_path / "plain", extra={"mine": 1})
        with pytest.raises(UsageError, match="does not say how far a training was, because no Trainer wrote it"):
            trainer(pm).resume(tmp_path / "plain")
