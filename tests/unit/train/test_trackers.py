"""Trackers of experiments: what they are sent, runs that resume, and errors that do not end a training."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import wandb
from mlflow.exceptions import MlflowException
from support.tracking import mlflow_history, mlflow_run, offline, wandb_attempts
from support.train_cli import records
from support.training import Record, parallel, trainer
from wandb.sdk.wandb_run import Run  # wandb.Run, in versions before 0.22 too

from autopar.errors import TrackingWarning, UsageError
from autopar.train import Checkpoints, JsonLog, Mlflow, TensorBoard, Tracker, Wandb, read_run
from autopar.train.run.reports import EpochReport, RunPosition, StepReport
from autopar.train.trackers.scalars import scalars, summary
from autopar.train.trackers.tracker import Logged, status_of
from autopar.train.trackers.wandb_files import history
from autopar.train.trackers.wandb_run import logged_by

CONFIG = {"lr": 3e-3, "betas": [0.9, 0.99], "folder": Path("data"), "left_out": None}
WRITE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def on_this_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offline(monkeypatch, tmp_path)


@pytest.fixture
def trackers(tmp_path: Path) -> list[Tracker]:
    return [Tracker(Wandb("digits", tags=("a", "b"), folder=tmp_path), CONFIG), Tracker(Mlflow("digits"), CONFIG)]


STEP = StepReport(2, 1, 9, 1.5, 0.01, None, 40.0, 2**20, True, 0.25)
EPOCH = EpochReport(2, 16, 1.25, 0.01, 40.0, 2**20, 0.5, 0.75, 1.0, None, True)


def test_names_of_figures() -> None:
    assert scalars("train", STEP) == {
        "train/epoch": 2, "train/step": 1, "train/update": 9, "train/loss": 1.5, "train/lr": 0.01,
        "train/samples_per_second": 40, "train/peak_bytes": 2**20, "train/skipped": 1, "train/data_share": 0.25,
    }  # fmt: skip
    assert scalars("epoch", EPOCH) == {
        "epoch/epoch": 2, "epoch/update": 16, "epoch/loss": 1.25, "epoch/lr": 0.01, "epoch/samples_per_second": 40,
        "epoch/peak_bytes": 2**20, "epoch/accuracy": 0.5, "epoch/top5": 0.75, "epoch/test_loss": 1.0, "epoch/best": 1,
        "epoch/data_share": 0,
    }  # fmt: skip
    assert summary(RunPosition(3, 0, 8), [EPOCH], 0.5) == {
        "summary/updates": 16, "summary/epochs": 1, "summary/best_score": 0.5, "summary/samples_per_second": 40,
        "summary/peak_bytes": 2**20,
    }  # fmt: skip
    assert summary(RunPosition(1, 3, 8), [], None) == {"summary/updates": 3, "summary/epochs": 0}


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (KeyboardInterrupt(), "killed"), (SystemExit(143), "killed"), (OSError(), "failed")],
)
def test_status_of_a_run(error: BaseException | None, status: str) -> None:
    assert status_of(error) == status


def test_all_trackers_have_what_the_json_log_has(tmp_path: Path, trackers: list[Tracker]) -> None:
    folder = tmp_path / "run"
    with parallel() as pm:
        trainer(pm, callbacks=[JsonLog(folder), *trackers, TensorBoard(folder), Checkpoints(folder)]).fit()
    steps, epochs = records(folder / "steps.jsonl"), records(folder / "history.jsonl")
    expected: dict[str, dict[int, float]] = {}
    for group, lines in (("train", steps), ("epoch", epochs)):
        for line in lines:
            for name, value in line.items():
                if value is not None:
                    expected.setdefault(f"{group}/{name}", {})[line["update"]] = float(value)
    assert len(expected["train/loss"]) == 10 and len(expected["epoch/accuracy"]) == 2

    (attempt,) = wandb_attempts(tmp_path)
    run = mlflow_run("digits")
    for name, by_update in expected.items():
        assert {int(row["_step"]): row[name] for row in attempt.rows if name in row} == by_update, name
        assert dict(mlflow_history(run, name)) == by_update, name
    assert tensorboard(folder) == {name: len(by_update) for name, by_update in expected.items()}

    assert (attempt.project, attempt.tags, attempt.exit_code) == ("digits", ("a", "b"), 0)
    assert run.info.status == "FINISHED"
    for config in (attempt.config, run.data.params):
        assert {"left_out"} & config.keys() == set()
        assert [str(config[name]) for name in ("lr", "betas", "folder")] == ["0.003", "[0.9, 0.99]", "data"]
        assert str(config["plan/mesh"]) == "pp 1 × tp 1 × dp 1" and str(config["plan/batch"]) == "20"
        assert float(config["plan/predicted_step_seconds"]) > 0 and config["versions/torch"]
    last, best = folder / "last", max(epochs, key=lambda line: line["accuracy"])
    for found in (attempt.summary, run.data.tags):
        assert found["checkpoint/last"] == str(last) and int(found["checkpoint/last_update"]) == 10
        assert int(found["checkpoint/best_update"]) == best["update"]
    for found in (attempt.summary, run.data.metrics):
        assert (found["summary/updates"], found["summary/best_score"]) == (10, best["accuracy"])
    assert read_run(last).run_ids == {"Weights & Biases": attempt.run_id, "MLflow": run.info.run_id}


def tensorboard(folder: Path) -> dict[str, int]:
    """Number of values of each figure."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}


def test_a_resumed_run_goes_on_in_its_trackers(tmp_path: Path, trackers: list[Tracker]) -> None:
    folder = tmp_path / "run"
    with parallel() as pm, pytest.raises(KeyboardInterrupt):
        trainer(pm, callbacks=[*trackers, Checkpoints(folder, every=3), Record(fail_at=8)]).fit()
    assert read_run(folder / "last").position.update == 6
    (first,) = wandb_attempts(tmp_path)
    assert first.exit_code == 255 and mlflow_run("digits").info.status == "KILLED"
    assert [row["_step"] for row in first.rows] == list(range(1, 9))

    with parallel(batch=20, microbatches=2) as pm:
        again = trainer(pm, callbacks=[*trackers, Checkpoints(folder, every=3)])
        again.resume(folder / "last")
        again.fit()
    attempts, run = wandb_attempts(tmp_path), mlflow_run("digits")
    assert [attempt.run_id for attempt in attempts] == [first.run_id] * 2 and attempts[1].exit_code == 0
    rows = [row for attempt in attempts for row in attempt.rows]
    assert [row["_step"] for row in rows] == [row["train/update"] for row in rows] == list(range(1, 11))
    assert [row["epoch/epoch"] for row in rows if "epoch/epoch" in row] == [1, 2]
    assert [step for step, _ in mlflow_history(run, "train/loss")] == list(range(1, 11))
    assert mlflow_history(run, "epoch/epoch") == [(5, 1), (10, 2)]
    assert run.info.status == "FINISHED"
    assert (attempts[1].config["plan/microbatches"], attempts[0].config["plan/microbatches"]) == (2, 1)
    assert (run.data.tags["plan/microbatches"], run.data.params["plan/microbatches"]) == ("2", "1")
    assert "plan/mesh" not in run.data.tags  # unchanged


def test_an_evaluation_that_a_resumed_run_repeats_is_logged(tmp_path: Path, trackers: list[Tracker]) -> None:
    """Ctrl-C in the evaluation: the epoch's updates are logged, its report is not."""
    folder = tmp_path / "run"

    def fit(interrupt: bool) -> None:
        with parallel() as pm:
            again = trainer(pm, callbacks=[*trackers, Checkpoints(folder)])
            again.resume_or_start(folder)
            evaluations = again.evaluations

            def ask() -> Any:
                again.interrupt.number = 2
                return evaluations()

            if interrupt:
                again.evaluations = ask
                with pytest.raises(KeyboardInterrupt):
                    again.fit()
            else:
                again.fit()

    fit(interrupt=True)
    assert read_run(folder / "last").position == RunPosition(1, 5, 5)
    fit(interrupt=False)
    rows = [row for attempt in wandb_attempts(tmp_path) for row in attempt.rows]
    assert [row["train/update"] for row in rows if "train/update" in row] == list(range(1, 11))
    epochs = [(row["epoch/epoch"], row["epoch/update"]) for row in rows if "epoch/epoch" in row]
    assert epochs == [(1, 5), (2, 10)]
    assert mlflow_history(mlflow_run("digits"), "epoch/epoch") == [(5, 1), (10, 2)]


def test_a_failing_training_is_marked(tmp_path: Path, trackers: list[Tracker]) -> None:
    class Fail(Record):
        def on_step(self, trainer: Any, report: StepReport) -> None:
            if report.update == 3:
                raise OSError("disk full")

    with parallel() as pm, pytest.raises(OSError, match="disk full"):
        trainer(pm, callbacks=[*trackers, Fail()]).fit()
    (attempt,) = wandb_attempts(tmp_path)
    assert attempt.exit_code == 1 and attempt.summary["summary/status"] == "failed"
    assert mlflow_run("digits").info.status == "FAILED"


# -- errors of trackers ------------------------------------------------------------------------------------------------


def failing(calls: set[int], call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The function, but its calls with these numbers (from 1) raise."""
    count = 0

    def act(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count in calls:
            raise error
        return call(*args, **kwargs)

    return act


def test_a_server_that_fails_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's figures wait for it, the first error is a warning, and nothing is missing."""
    tracker = Tracker(Mlflow("digits"))
    client = mlflow.MlflowClient
    # The first call logs parameters; each attempt takes along what waits.
    monkeypatch.setattr(client, "log_batch", failing({3, 4}, client.log_batch, MlflowException("502 bad gateway.")))
    with parallel() as pm, pytest.warns(TrackingWarning) as caught:
        trainer(pm, callbacks=[tracker]).fit()
    (warning,) = [own for own in caught if own.category is TrackingWarning]
    assert re.fullmatch(
        r"MLflow failed at (update|epoch) \d+: MlflowException: 502 bad gateway\. This does not stop the training; "
        r"further failures are counted and reported at its end\.",
        str(warning.message),
    )
    run = mlflow_run("digits")
    assert [step for step, _ in mlflow_history(run, "train/loss")] == list(range(1, 11))
    assert run.info.status == "FINISHED"


def test_trackers_that_fail_until_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trackers: list[Tracker]
) -> None:
    client = mlflow.MlflowClient
    lost = failing(set(range(2, 1000)), client.log_batch, ConnectionError("no route to host"))
    monkeypatch.setattr(client, "log_batch", lost)
    monkeypatch.setattr(Run, "log", failing({2, 5}, Run.log, BrokenPipeError()))
    with parallel() as pm, pytest.warns(TrackingWarning) as caught:
        history = trainer(pm, callbacks=trackers).fit()
    assert len(history) == 2
    texts = [str(warning.message) for warning in caught]
    assert texts[0].startswith("Weights & Biases failed at update 2: BrokenPipeError. This does not stop the training;")
    assert [text for text in texts if "MLflow failed at" in text and "ConnectionError: no route to host." in text]
    assert texts[-2:] == ["MLflow lacks 13 of this run's reports.", "Weights & Biases lacks 2 of this run's reports."]
    assert len(texts) == 4
    (attempt,) = wandb_attempts(tmp_path)
    assert [row["train/update"] for row in attempt.rows if "train/update" in row] == [1, 3, 4, 6, 7, 8, 9, 10]
    assert mlflow_run("digits").info.status == "FINISHED"


def test_a_server_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Event()
    client = mlflow.MlflowClient
    send = client.log_batch
    monkeypatch.setattr("autopar.train.trackers.mlflow_run.FINISH_SECONDS", 0.1)
    monkeypatch.setattr(client, "log_batch", lambda *a, **k: (k.get("params") or silence.wait(), send(*a, **k)))
    with parallel() as pm, pytest.warns(TrackingWarning) as caught:
        trainer(pm, callbacks=[Tracker(Mlflow("digits"))]).fit()
    silence.set()
    assert [str(warning.message) for warning in caught] == [
        "MLflow failed at end of the run: TimeoutError: the store did not answer within 0.1 s. This does not stop the "
        "training; further failures are counted and reported at its end.",
        "MLflow lacks 13 of this run's reports.",
    ]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_that_cannot_be_opened(resumes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ends a training before it starts, but not one that resumes."""
    tracker = Tracker(Mlflow("digits"))
    with parallel() as pm:
        one = trainer(pm, callbacks=[tracker, Checkpoints(tmp_path / "run")])
        if resumes:
            first = trainer(pm, epochs=1, callbacks=[tracker, Checkpoints(tmp_path / "run")])
            first.fit()
            one.resume(tmp_path / "run" / "last")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        expected = r"MLflow cannot open a run: MlflowException: .*127\.0\.0\.1.*\. MLFLOW_TRACKING_URI names the store"
        if not resumes:
            with pytest.raises(UsageError, match=expected):
                one.fit()
            return
        with pytest.warns(TrackingWarning, match=expected):
            one.fit()
    assert one.position.epoch == 3
    assert read_run(tmp_path / "run" / "last").run_ids == first.run_ids  # for a later attempt


@pytest.fixture
def wandb_reads_its_environment_again() -> Iterator[None]:
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("wandb_reads_its_environment_again")
def test_wandb_without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with parallel() as pm, pytest.raises(UsageError) as caught:
        trainer(pm, callbacks=[Tracker(Wandb(folder=tmp_path))]).fit()
    message = str(caught.value)
    assert re.match(r"Weights & Biases cannot open a run: UsageError: (No API key|api_key not) configured", message)
    assert message.endswith("Log in with `wandb login`, or set WANDB_MODE=offline and upload later with `wandb sync`.")


@pytest.mark.parametrize(
    ("module", "make", "library"), [("wandb", Wandb, "wandb"), ("mlflow", Mlflow, "mlflow-skinny")]
)
def test_missing_libraries(module: str, make: type, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs {library}: pip install 'autopar\[tracking\]'"):
        make()


def test_checkpoints_of_earlier_versions_have_no_runs(tmp_path: Path) -> None:
    with parallel() as pm:
        one = trainer(pm, epochs=1, callbacks=[Checkpoints(tmp_path)])
        one.fit()
        run = asdict(read_run(tmp_path / "last"))
        assert run.pop("run_ids") == {}
        pm.save_checkpoint(tmp_path / "older", run)
    assert read_run(tmp_path / "older") == read_run(tmp_path / "last")


# -- details -----------------------------------------------------------------------------------------------------------


def test_a_given_run_outranks_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=[Tracker(Wandb(folder=tmp_path)), Checkpoints(folder)]).fit()
        again = trainer(pm, callbacks=[Tracker(Wandb(run_id="mine", folder=tmp_path)), Checkpoints(folder)])
        again.resume(folder / "last")
        again.fit()
    assert read_run(folder / "last").run_ids == {"Weights & Biases": "mine"}
    found = {attempt.run_id: [row["_step"] for row in attempt.rows] for attempt in wandb_attempts(tmp_path)}
    assert found.pop("mine") == list(range(6, 11))
    assert list(found.values()) == [list(range(1, 6))]


def test_how_far_a_run_on_the_server_is_logged(tmp_path: Path) -> None:
    """Its summary comes with the resumed run."""
    run = wandb.init(project="p", dir=tmp_path)
    for figures, expected in (({}, Logged()), ({"train/update": 8, "epoch/epoch": 1, "note": "x"}, Logged(8, 1))):
        run.summary.update(figures)
        assert logged_by(SimpleNamespace(resumed=True, offline=False, summary=run.summary)) == expected
    assert logged_by(SimpleNamespace(resumed=False, offline=False, summary=run.summary)) == Logged()
    run.finish()


def test_checkpoints_are_uploaded_if_asked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trackers = [Tracker(service, upload_checkpoints=True) for service in (Wandb(folder=tmp_path), Mlflow("digits"))]
    with parallel() as pm:
        trainer(pm, epochs=1, callbacks=[*trackers, Checkpoints(folder)]).fit()
    files = {str(path.relative_to(folder / "last")) for path in (folder / "last").rglob("*") if path.is_file()}
    (attempt,) = wandb_attempts(tmp_path)
    assert attempt.artifacts["checkpoint last, latest, update-5"] == files and len(attempt.artifacts) == 2
    run, client = mlflow_run("digits"), mlflow.MlflowClient()
    names = {info.path for info in client.list_artifacts(run.info.run_id, "checkpoints")}
    assert names == {"checkpoints/best-5", "checkpoints/last-5"}
    copy = Path(client.download_artifacts(run.info.run_id, "checkpoints/last-5"))
    with parallel() as pm:
        again = trainer(pm, epochs=1)
        again.resume(copy)
        assert again.position.update == 5


def test_files_of_wandb_that_end_within_a_record(tmp_path: Path) -> None:
    run = wandb.init(project="p", dir=tmp_path, id="long", settings={"x_disable_stats": True})
    for step in range(1, 400):
        run.log({"train/update": step, "text": "x" * (1000 if step % 7 else 40_000)}, step=step)
    run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + WRITE_SECONDS
    while len(rows := [row["train/update"] for row in history(path)]) < 399 and time.monotonic() < end:
        time.sleep(0.1)  # wandb may write the last block after finish()
    assert rows == list(range(1, 400)) and path.stat().st_size > 5 * 2**15
    data = path.read_bytes()
    for size in (len(data) // 2, len(data) // 3, 2**15 + 3, 2**15 - 2, 100, 7, 0):
        path.write_bytes(data[:size])
        cut = [row["train/update"] for row in history(path)]
        assert cut == rows[: len(cut)] and len(cut) < len(rows)
