"""MLflow: a run in the tracking store that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from autopar.train.timm_optional import needed
from autopar.train.trackers.scalars import EPOCH, UPDATE
from autopar.train.trackers.tracker import Logged, Status

FINISH_SECONDS = 300.0  # a rank that waits for a server holds its GPU, and other ranks wait for it
MAX_PARAMS = 100  # in one request
MAX_REPORTS = 40  # in one request, which may have 1,000 figures and 100 tags
MAX_WAITING = 100_000  # reports that are kept for a server that does not answer: about 300 MB
STATUSES: Mapping[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


@dataclass(frozen=True)
class Mlflow:
    """Run of MLflow, for `Tracker`.

    The store is that of MLFLOW_TRACKING_URI: an http address, or without a server ``sqlite:///mlflow.db`` (MLflow's
    default, which takes the package mlflow) or a folder (``file:mlruns`` with MLFLOW_ALLOW_FILE_STORE=true).
    Figures are sent by a thread: a server that does not answer does not hold up the training. What it lacks is kept,
    up to 100,000 reports, and sent again with the next step. At the end of the run this is waited for, 300 s at most.
    MLflow's own waits are those of MLFLOW_HTTP_REQUEST_TIMEOUT and MLFLOW_HTTP_REQUEST_MAX_RETRIES.

    The description of the run are its parameters. These never change in MLflow: where a resumed run differs, as on
    another mesh, a tag of the parameter's name has the new value.

    Args:
        experiment: the experiment; by default $MLFLOW_EXPERIMENT_NAME, $MLFLOW_EXPERIMENT_ID, or ``Default``.
        name: the run's name in lists; random words by default.
        run_id: the run to go on with; by default the checkpoint's, $MLFLOW_RUN_ID, or a new one.
    """

    experiment: str | None = None
    name: str | None = None
    run_id: str | None = None
    title = "MLflow"
    hint = (
        "MLFLOW_TRACKING_URI names the store: http://HOST:PORT; or without a server file:mlruns with "
        "MLFLOW_ALLOW_FILE_STORE=true, or sqlite:///mlflow.db, for which you `pip install mlflow`."
    )

    def __post_init__(self) -> None:
        """Raise a UsageError if mlflow is not installed."""
        needed("mlflow", "Mlflow", "mlflow-skinny", "tracking")

    def open(self, run_id: str | None, config: Mapping[str, Any]) -> MlflowRun:
        client = needed("mlflow", "Mlflow", "mlflow-skinny", "tracking").MlflowClient()
        run_id = self.run_id or run_id or os.environ.get("MLFLOW_RUN_ID")
        if run_id is None:
            run_id = self.create(client)
        else:
            client.update_run(run_id, "RUNNING")
        data = client.get_run(run_id).data
        run = MlflowRun(client, run_id, Logged(*(int(data.metrics.get(name, 0)) for name in (UPDATE, EPOCH))))
        run.describe({name: str(value) for name, value in config.items()}, data.params)
        return run

    def create(self, client: Any) -> str:
        """ID of a new run in the experiment, which is created if there is none."""
        context = needed("mlflow.tracking.context.registry", "Mlflow", "mlflow-skinny", "tracking")
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        number = None if name else os.environ.get("MLFLOW_EXPERIMENT_ID")
        if number is None:
            found = client.get_experiment_by_name(name or "Default")
            number = found.experiment_id if found is not None else client.create_experiment(name or "Default")
        return client.create_run(number, tags=context.resolve_tags(), run_name=self.name).info.run_id


@dataclass(frozen=True)
class Report:
    """Figures and tags that go to the server together."""

    metrics: Sequence[Any] = ()
    tags: Sequence[Any] = ()


class MlflowRun:
    """A run of MLflow that is open for writing."""

    def __init__(self, client: Any, run_id: str, logged: Logged) -> None:
        self.client, self.id, self.logged = client, run_id, logged
        self.entities = needed("mlflow.entities", "Mlflow", "mlflow-skinny", "tracking")
        self.waiting: SimpleQueue[Report] = SimpleQueue()
        self.batch: list[Report] = []  # what the sender took from there
        self.num_dropped = 0
        self.sender = Thread()
        self.failure: Exception | None = None  # of the sender

    @property
    def num_lost(self) -> int:
        return self.num_dropped + len(self.batch) + self.waiting.qsize()

    def describe(self, config: Mapping[str, str], params: Mapping[str, str]) -> None:
        """Log parameters that the run lacks, and tags for those that it has with other values."""
        new = [self.entities.Param(name, value) for name, value in config.items() if name not in params]
        for start in range(0, len(new), MAX_PARAMS):
            self.client.log_batch(self.id, params=new[start : start + MAX_PARAMS])
        for name, value in config.items():
            if params.get(name, value) != value:
                self.client.set_tag(self.id, name, value)

    def log(self, figures: Mapping[str, float], update: int) -> None:
        self.put(self.report(figures, update))

    def report(self, figures: Mapping[str, float], update: int) -> Report:
        now = round(time.time() * 1000)
        return Report([self.entities.Metric(name, value, now, update) for name, value in figures.items()])

    def refer(self, name: str, folder: Path, update: int) -> None:
        tags = {f"checkpoint/{name}": str(folder), f"checkpoint/{name}_update": str(update)}
        self.put(Report(tags=[self.entities.RunTag(*tag) for tag in tags.items()]))

    def upload(self, name: str, folder: Path, update: int) -> None:
        self.client.log_artifacts(self.id, str(folder), f"checkpoints/{name}-{update}")

    def finish(self, figures: Mapping[str, float], status: Status, update: int) -> None:
        end = time.monotonic() + FINISH_SECONDS
        self.waiting.put(self.report(figures, update))
        if self.sender.is_alive():
            self.sender.join(FINISH_SECONDS)
        if not self.sender.is_alive():
            self.failure = None  # of an attempt before, which this one repeats
            self.sender = Thread(target=self.close, args=(status,), daemon=True)
            self.sender.start()
            self.sender.join(max(0.0, end - time.monotonic()))
        if self.sender.is_alive():
            raise TimeoutError(f"the store did not answer within {FINISH_SECONDS:g} s")
        if self.failure is not None:
            raise self.failure

    def put(self, report: Report) -> None:
        """Hand a report to the sender, and raise the error of its last attempt."""
        if self.waiting.qsize() < MAX_WAITING:
            self.waiting.put(report)
        else:
            self.num_dropped += 1
        if self.sender.is_alive():
            return
        failure, self.failure = self.failure, None
        self.sender = Thread(target=self.send, daemon=True)  # the process may end without it
        self.sender.start()
        if failure is not None:
            raise failure

    # -- in the sender's thread ----------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what waits; after an error the rest stays for the next attempt."""
        try:
            while self.fill():
                metrics = [metric for report in self.batch for metric in report.metrics]
                self.client.log_batch(self.id, metrics, tags=[tag for report in self.batch for tag in report.tags])
                self.batch = []
        except Exception as error:
            self.failure = error

    def fill(self) -> bool:
        """Whether there is anything to send; moves waiting reports into the batch."""
        while len(self.batch) < MAX_REPORTS and not self.waiting.empty():
            self.batch.append(self.waiting.get())
        return bool(self.batch)

    def close(self, status: Status) -> None:
        """Send what waits, and then the status."""
        self.send()
        try:
            self.client.set_terminated(self.id, STATUSES[status])
        except Exception as error:
            self.failure = self.failure or error
