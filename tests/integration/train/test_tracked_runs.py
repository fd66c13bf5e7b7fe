"""``autopar train`` of several ranks with experiment trackers, interrupted and resumed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.cli import invoke
from support.tracking import mlflow_history, mlflow_run, offline, wandb_attempts
from support.train_cli import MAIN, SHORT, ended, losses, start

TRACKED = ["--log-wandb", "--log-mlflow", "--mlflow-experiment", "E", "-o", "out"]


@pytest.mark.full
def test_ctrl_c_under_torchrun_and_a_continuation_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch, tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable)
    process = start(tmp_path, "-c", MAIN, "train", *SHORT, "--dp", "2", *TRACKED, launcher=launcher)
    log = Path("out/steps.jsonl")
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, error = ended(process, 100)
    assert "all of it is saved. Go on under torchrun with" in error, error
    (first,) = wandb_attempts(Path("out"))  # one rank logs
    done = len(losses(Path("out")))
    assert 2 <= done == len(first.rows) < 16 and first.exit_code == 255
    assert mlflow_run("E").info.status == "KILLED"

    code, _, error = invoke("train", *SHORT, "--devices", "1", *TRACKED, "--resume", "out")
    assert code == 0, error
    logged = losses(Path("out"))
    attempts, run = wandb_attempts(Path("out")), mlflow_run("E")
    assert len(logged) == 16 and [attempt.run_id for attempt in attempts] == [first.run_id] * 2
    assert [row["train/loss"] for attempt in attempts for row in attempt.rows] == logged
    assert mlflow_history(run, "train/loss") == list(enumerate(logged, 1)) and run.info.status == "FINISHED"
    assert (run.data.params["plan/dp"], run.data.tags["plan/dp"]) == ("2", "1")
