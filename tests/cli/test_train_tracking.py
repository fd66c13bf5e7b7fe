"""``autopar train`` with experiment trackers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.cli import invoke
from support.tracking import mlflow_history, mlflow_run, offline, wandb_attempts
from support.train_cli import TINY, losses

from autopar.train import read_run

RUN = [
    *TINY, "--data", "digits", "--devices", "1", "--batch-size", "32", "--train-num-samples", "96",
    "--val-num-samples", "16", "--sched", "constant", "-o", "out",
]  # fmt: skip
TRACKED = [
    "--log-wandb",
    "--wandb-project",
    "vit",
    "--wandb-tags",
    "a",
    "b",
    "--log-mlflow",
    "--mlflow-experiment",
    "E",
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch, tmp_path)


def test_a_run_and_its_continuation() -> None:
    for more in (["--epochs", "1"], ["--epochs", "2", "--microbatches", "2", "--resume", "auto"]):
        code, _, error = invoke("train", *RUN, *TRACKED, *more)
        assert code == 0, error
    first, second = wandb_attempts(Path("out"))
    run = mlflow_run("E")
    logged = losses(Path("out"))
    assert len(logged) == 6
    assert [row["train/loss"] for row in (*first.rows, *second.rows)] == logged
    assert mlflow_history(run, "train/loss") == list(enumerate(logged, 1))
    assert first.run_id == second.run_id and (first.project, first.tags) == ("vit", ("a", "b"))
    assert run.info.run_name == "out" and run.info.status == "FINISHED"
    assert read_run("out/last").run_ids == {"Weights & Biases": first.run_id, "MLflow": run.info.run_id}
    flags = {"data": "digits", "batch_size": "32", "epochs": "1", "lr": "0.001", "plan/microbatches": "1"}
    assert (
        flags.items() <= run.data.params.items()
        and flags.items() <= {k: str(v) for k, v in first.config.items()}.items()
    )
    assert {"epochs": "2", "microbatches": "2"}.items() <= {k: str(v) for k, v in second.config.items()}.items()
    assert {"epochs": "2", "plan/microbatches": "2"}.items() <= run.data.tags.items()
    kept_out = {"log_wandb", "wandb_project", "as_json", "resume_from", "pin", "hardware"}
    assert not kept_out & {*first.config, *run.data.params}


def test_trackers_without_their_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag, module in (("--log-wandb", "wandb"), ("--log-mlflow", "mlflow")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            code, _, error = invoke("train", *RUN, "--epochs", "1", flag)
        assert code == 2 and "pip install 'autopar[tracking]'" in error, error


def test_evaluation_alone_is_not_tracked() -> None:
    code, _, error = invoke("train", *TINY, "--data", "digits", "--val-only", "--log-wandb")
    assert code == 2 and "--log-wandb does nothing here: --val-only trains nothing." in error, error


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    code, _, error = invoke("train", *RUN, "--epochs", "1", "--log-mlflow")
    assert code == 2 and "error: MLflow cannot open a run: MlflowException: " in error, error
    assert not Path("out/last").exists() and losses(Path("out")) == []
