"""``autopar train`` on other meshes, under torchrun, and after it was killed or interrupted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from support.cli import invoke
from support.train_cli import MAIN, SHORT, TINY, contents, ended, losses, records, start

from autopar.tools.cli.existing_run import command
from autopar.train import read_run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the SHORT run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    code, _, error = invoke("train", *SHORT, "--devices", "1", "-o", str(folder))
    assert code == 0, error
    return folder


@pytest.mark.full
def test_torchrun_has_the_losses_of_one_device(alone, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python", sys.executable)
    # The first stages read images, the last ones labels; each pipeline has its half of every batch.
    process = start(tmp_path, "-c", MAIN, "train", *SHORT, "--pp", "2", "--dp", "2", "-o", "out", launcher=launcher)
    printed, error = ended(process, 200)
    assert process.returncode == 0, error[-3000:]
    assert printed.count("test accuracy") == 1  # one rank prints
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-4)
    ours, theirs = (records(folder / "history.jsonl") for folder in (tmp_path / "out", alone))
    assert [h["accuracy"] for h in ours] == pytest.approx([h["accuracy"] for h in theirs], abs=0.011)  # a near tie
    assert [h["test_loss"] for h in ours] == pytest.approx([h["test_loss"] for h in theirs], rel=1e-3)


def test_killed_and_resumed_on_another_mesh(alone, tmp_path):
    process = start(tmp_path, "train", *SHORT, "--devices", "1", "--checkpoint-steps", "3", "-o", "out")
    log = tmp_path / "out" / "steps.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 11):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    code, printed, error = invoke(
        "train", *SHORT, "--devices", "2", "--pp", "2", "--checkpoint-steps", "3", "-o", str(tmp_path / "out"),
        "--resume", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 0, error
    assert "epoch 1/2" not in printed and "epoch 2/2" in printed
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-4)


def interrupt(process: subprocess.Popen[str], log: Path, lines: int) -> str:
    """Text on stderr after Ctrl-C in the terminal, sent once the log has ``lines`` lines."""
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= lines):
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, error = ended(process, 100)
    assert len(family) >= 2  # workers, and processes that read images
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    return error


@pytest.mark.full
def test_ctrl_c_saves_and_says_how_to_go_on(alone, tmp_path, monkeypatch):
    process = start(tmp_path, "train", *SHORT, "--devices", "2", "--workers", "1", "-o", "out")
    error = interrupt(process, tmp_path / "out" / "steps.jsonl", 3)
    assert process.returncode == 130, error
    assert "Traceback" not in error and "Interrupted: the run ends after this update." in error
    found = re.search(
        r"Interrupted in epoch (\d), after (\d) of 8 updates; all of it is saved\. Go on with\n"
        r"autopar (train .* -o out --resume out/last)\n",
        error,
    )
    assert found, error
    done = len(losses(tmp_path / "out"))
    assert done == 8 * (int(found[1]) - 1) + int(found[2]) and done < 16
    monkeypatch.chdir(tmp_path)
    code, _, error = invoke(*shlex.split(found[3]))
    assert code == 0, error
    assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.full
def test_ctrl_c_under_torchrun(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable)
    process = start(tmp_path, "-c", MAIN, "train", *SHORT, "--dp", "2", "-o", "out", launcher=launcher)
    error = interrupt(process, tmp_path / "out" / "steps.jsonl", 2)
    assert error.count("all of it is saved. Go on under torchrun with") == 1, error  # one rank speaks
    assert "autopar/" not in error.replace("autopar train", "")  # no traceback but the launcher's own
    saved = read_run(tmp_path / "out" / "last").position
    assert saved.update == len(losses(tmp_path / "out")) < 16


TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", MAIN
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "everyone"),
    [((), False), ((), True), (TORCHRUN, True)],  # torchrun passes SIGTERM on to all
    ids=["pool-caller", "pool-all", "torchrun-all"],
)
def test_sigterm_saves_and_the_same_command_goes_on(alone, tmp_path, launcher, everyone):
    """To the first process alone, or to all processes of the job, as Slurm and systemd send it."""
    run = ["train", *SHORT, "--dp", "2", "--devices", "2", "--workers", "1", "-o", "out", "--resume", "auto"]
    process, log = start(tmp_path, *run, launcher=launcher), tmp_path / "out" / "steps.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 4, process.communicate()  # workers or ranks, and processes that read images
    for each in [*family, process] if everyone else [process]:
        os.kill(each.pid, signal.SIGTERM)
    _, error = ended(process, 100)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert "Terminated: the run ends after this update." in error and "all of it is saved" in error, error
    assert process.returncode == (143 if not launcher else 1), error  # torchrun's own code
    assert read_run(tmp_path / "out" / "last").position.update == len(losses(tmp_path / "out")) < 16
    for times in range(2 if everyone else 1):  # the second time there is nothing left to do
        again = start(tmp_path, *run, launcher=launcher)
        printed, error = ended(again, 200)
        assert again.returncode == 0, error
        assert losses(tmp_path / "out") == pytest.approx(losses(alone), rel=1e-4)
        assert printed.count("The run in out is finished: it has done 2 epochs.") == times


@pytest.mark.filterwarnings("default::autopar.errors.ResumeWarning")
def test_resume_auto(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ["train", *TINY, "--data", "digits", "--devices", "1", "--epochs", "1", "--train-num-samples", "64"]
    run += ["--val-num-samples", "16", "--sched", "constant", "-o", "out", "--resume", "auto"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.jsonl").write_text('{"update": 1}\n')
    code, _, error = invoke(*run)
    assert code == 0 and "warning: The run in out had ended before its first checkpoint: it" in error, error
    before = contents(tmp_path / "out")
    code, printed, error = invoke(*run)
    assert code == 0 and "The run in out is finished: it has done 1 epoch. Its weights are in out" in printed, error
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "model.safetensors").unlink()  # it was killed before it wrote them
    code, printed, error = invoke(*run)
    assert code == 0 and "test accuracy" in printed, error
    now = contents(tmp_path / "out")
    weights, steps = (tmp_path / "out" / name for name in ("model.safetensors", "steps.jsonl"))
    was, written = safetensors.torch.load(before[weights]), safetensors.torch.load(now[weights])
    assert all(torch.equal(was[name], tensor) for name, tensor in written.items()) and now[steps] == before[steps]
    code, _, error = invoke(*run, "--overwrite")
    assert code == 2 and "--resume auto goes on with the run in --output, --overwrite would remove it" in error, error
    header = tmp_path / "out" / "last" / "checkpoint.json"
    header.write_text("")
    code, _, error = invoke(*run)
    assert code == 2 and "out/best is whole, after 1 update: resume from that, or choose another" in error, error


def test_another_run_is_refused_before_anything_is_planned(alone, tmp_path, monkeypatch):
    monkeypatch.setattr("autopar.tools.cli.train_run.parallelize", None)
    code, _, error = invoke(
        "train", *SHORT, "--devices", "1", "--seed", "3", "--batch-size", "64", "--epochs", "5", "--resume", str(alone),
        "--smoothing", "0.25", "--scale", "0.5", "1.0", "-o", str(tmp_path / "new"),
    )  # fmt: skip
    assert code == 2
    assert "this would change --seed from 0 to 3, --batch-size from 32 to 64" in error, error
    assert "--epochs (the length of the schedule) from 2 to 5" in error
    assert "--scale from None to [0.5, 1.0], --smoothing from " in error and " to 0.25" in error
    code, _, error = invoke("train", *SHORT, "--devices", "1", "--resume", str(alone), "-o", str(tmp_path / "new"))
    assert code == 2
    assert "last is finished: it has done 2 epochs, --epochs is 2. The schedule cosine ends there: only a" in error
    shutil.copytree(alone / "last", tmp_path / "cut")
    next((tmp_path / "cut").glob("data-*/*.distcp")).write_bytes(b"")
    code, _, error = invoke(
        "train", *SHORT, "--devices", "1", "--resume", str(tmp_path / "cut"), "-o", str(tmp_path / "new")
    )
    assert (code, "cut is damaged: in data-" in error) == (2, True), error


@pytest.mark.full
def test_a_finished_run_gets_more_epochs_in_another_folder(tmp_path):
    few = [*TINY, "--data", "digits", "--train-num-samples", "64", "--val-num-samples", "20", "--batch-size", "32"]
    run = ["train", *few, "--devices", "1", "--sched", "constant"]
    old, new = tmp_path / "old", tmp_path / "new"
    assert invoke(*run, "--epochs", "1", "-o", str(old))[0] == 0
    code, _, error = invoke(*run, "--epochs", "1", "-o", str(new), "--resume", str(old))
    assert code == 2
    assert "it has done 1 epoch, --epochs is 1. Pass --epochs 2 or more to go on. `autopar export" in error, error
    assert not new.exists()
    assert invoke(*run, "--epochs", "2", "-o", str(new), "--resume", str(old))[0] == 0
    assert [line["update"] for line in records(new / "steps.jsonl")] == [1, 2, 3, 4]
    assert [line["epoch"] for line in records(new / "history.jsonl")] == [1, 2]
    assert {"last", "best", "model.safetensors"} <= {path.name for path in new.iterdir()}


# -- a folder that holds a run already ---------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused_and_nothing_is_lost(alone, tmp_path, monkeypatch):
    """Before anything is planned or read."""
    monkeypatch.setattr("autopar.tools.cli.train_run.parallelize", None)
    before, other = contents(alone), tmp_path / "other"
    there = (
        f"error: {alone} holds a run already: checkpoint last after 16 updates, checkpoint best after "
        f"{read_run(alone / 'best').position.update} updates, steps.jsonl of 16 updates, history.jsonl of 2 epochs, "
        f"model.safetensors. Go on with it by --resume {alone}/last, choose another --output, or pass --overwrite to "
        "remove it and start over. "
    )
    shutil.copytree(alone, other)
    for more in ([], ["--resume", str(other)]):
        code, printed, error = invoke("train", *SHORT, "-o", str(alone), *more)
        assert (code, printed, error) == (2, "", there)
    for more in ([], ["-o", str(tmp_path / "new")]):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / SHORT[0]).symlink_to(other) if not more else None
        code, _, error = invoke("train", *SHORT, "--epochs", "1", "--warmup-epochs", "3", *more)
        told = "the learning rate would never reach its peak" if more else f"runs/{SHORT[0]} holds a run already: "
        assert code == 2 and told in error, error
    code, _, error = invoke("train", *SHORT, "-o", str(alone), "--resume", str(alone / "best"), "--overwrite")
    assert code == 2 and f"--resume goes on from {alone}/best, which --overwrite would remove with the" in error, error
    code, _, error = invoke("train", *SHORT, "-o", str(alone), "--overwrite", "--opt", "adamv", "--devices", "1")
    assert code == 2 and "adamv" in error, error
    assert contents(alone) == before


def test_overwrite_removes_the_earlier_run_and_nothing_else(tmp_path):
    few = [*TINY, "--data", "synthetic", "--train-num-samples", "16", "--val-num-samples", "4", "--batch-size", "8"]
    run = ["train", *few, "--devices", "1", "--sched", "constant", "-o", str(tmp_path)]
    assert invoke(*run, "--epochs", "2", "--model-ema")[0] == 0
    assert (tmp_path / "model_ema.safetensors").exists()
    for name in ("model.safetensors", "model_ema.safetensors", "history.jsonl"):
        assert (tmp_path / name).stat().st_mode == (tmp_path / "plan.json").stat().st_mode
    events = set((tmp_path / "tensorboard").iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "best" / "notes.txt").write_text("mine")
    code, printed, error = invoke(*run, "--epochs", "1", "--overwrite")
    assert code == 0, error
    assert f"Removed the earlier run in {tmp_path}: checkpoint last after 4 updates, " in printed, printed
    assert len(losses(tmp_path)) == 2 and len(records(tmp_path / "history.jsonl")) == 1
    assert read_run(tmp_path / "last").position.update == 2
    assert not (tmp_path / "model_ema.safetensors").exists() and (tmp_path / "model.safetensors").exists()
    assert not events & set((tmp_path / "tensorboard").iterdir())
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "best" / "notes.txt").read_text() == "mine"


@pytest.mark.full
def test_torchrun_refuses_a_folder_on_all_ranks(alone, tmp_path):
    """The second rank sees none of the folder: as on another node with a disk of its own."""
    (tmp_path / "0").symlink_to(alone.parent)
    (tmp_path / "1").mkdir()
    enter = f"import os; os.chdir(os.environ['RANK']); {MAIN}"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable)
    before = contents(alone)
    process = start(tmp_path, "-c", enter, "train", *SHORT, "--dp", "2", "-o", alone.name, launcher=launcher)
    printed, error = ended(process, 100)
    assert process.returncode != 0
    assert error.count(f"error: {alone.name} holds a run already: checkpoint last after 16 updates, ") == 2, error
    assert "mesh" not in printed and contents(alone) == before


def test_the_command_that_goes_on_does_not_overwrite(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autopar", "train", "m", "--overwrite", "-o", "out", "--resume", "old/last"])
    assert command(Path("out/last")) == "autopar train m -o out --resume out/last"
