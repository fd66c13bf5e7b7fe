"""Runs of experiment trackers as their libraries read them back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from autopar.train.trackers.wandb_files import records

RECORD: Any = import_module("wandb.proto.wandb_internal_pb2").Record  # protobuf makes the class when it is imported


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let both libraries write to this folder alone."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")  # pytest captures the output
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())


@dataclass(frozen=True)
class WandbAttempt:
    """What one attempt of a run left in its ``.wandb`` file."""

    run_id: str
    project: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    rows: tuple[dict[str, float], ...]
    summary: dict[str, Any]
    exit_code: int | None
    artifacts: Mapping[str, set[str]]  # names of files, by type and aliases


def wandb_attempts(folder: Path) -> list[WandbAttempt]:
    """The attempts in wandb's folder that have ended, the first one first."""
    return [wandb_attempt(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def wandb_attempt(path: Path) -> WandbAttempt:
    """What is in a file, once its last record is: wandb's process may write it after ``finish`` has returned."""
    end = time.monotonic() + 20
    while (attempt := read_attempt(path)) is None or attempt.exit_code is None:
        assert time.monotonic() < end, f"{path} does not end"
        time.sleep(0.02)
    return attempt


def read_attempt(path: Path) -> WandbAttempt | None:
    """What is in a file so far; None before its first record."""
    run: Any = None
    config, rows, summary, exit_code, artifacts = {}, [], {}, None, {}
    for record in map(RECORD.FromString, records(path.read_bytes())):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            config |= values(run.config.update)
        elif kind == "config":
            config |= values(record.config.update)
        elif kind == "history":
            rows.append(values(record.history.item))
        elif kind == "summary":
            summary |= values(record.summary.update)
        elif kind == "artifact":
            files = {content.path for content in record.artifact.manifest.contents}
            artifacts[f"{record.artifact.type} {', '.join(sorted(record.artifact.aliases))}"] = files
        elif kind == "exit":
            exit_code = record.exit.exit_code
    if run is None:
        return None
    return WandbAttempt(run.run_id, run.project, tuple(run.tags), config, tuple(rows), summary, exit_code, artifacts)


def values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def mlflow_run(experiment: str) -> Run:
    """The only run of an experiment."""
    client = MlflowClient()
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def mlflow_history(run: Run, name: str) -> list[tuple[int, float]]:
    """Step and value of each time that a figure was logged, by step."""
    logged = MlflowClient().get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in logged)
