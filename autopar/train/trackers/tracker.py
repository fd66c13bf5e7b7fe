"""The callback that logs a run with an experiment tracker: when what is logged, and what happens on errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from autopar.errors import TrackingWarning, UsageError, caller_level
from autopar.train.callbacks import Callback
from autopar.train.rank_zero import run_on_rank_zero
from autopar.train.run.reports import EpochReport, StepReport, TrainerView
from autopar.train.trackers.description import description
from autopar.train.trackers.scalars import EPOCHS, STEPS, scalars, summary

Status = Literal["finished", "killed", "failed"]


@dataclass(frozen=True)
class Logged:
    """How far earlier attempts logged a run: their last update and their last epoch, 0 for none."""

    update: int = 0
    epoch: int = 0


class TrackedRun(Protocol):
    """A run of a tracker that is open for writing. Its methods raise whatever the tracker's library raises."""

    @property
    def id(self) -> str: ...
    @property
    def logged(self) -> Logged: ...
    @property
    def num_lost(self) -> int:
        """Reports that did not reach the tracker so far, or have not yet."""
        ...

    def log(self, figures: Mapping[str, float], update: int) -> None: ...
    def refer(self, name: str, folder: Path, update: int) -> None:
        """Note where a checkpoint lies, and after which update it was saved."""
        ...

    def upload(self, name: str, folder: Path, update: int) -> None:
        """Copy a checkpoint's files to the tracker."""
        ...

    def finish(self, figures: Mapping[str, float], status: Status, update: int) -> None:
        """Log the summary and close the run; waits for what is not sent, for some minutes at most."""
        ...


class Service(Protocol):
    """A tracker's library and the settings of a run there; `Wandb` and `Mlflow` are such."""

    @property
    def title(self) -> str: ...
    @property
    def hint(self) -> str:
        """What a user can do where no run can be opened, as sentences."""
        ...

    def open(self, run_id: str | None, config: Mapping[str, Any]) -> TrackedRun:
        """A run that goes on with an earlier one, or a new one; ``run_id`` is that of the checkpoint."""
        ...


class Tracker(Callback):
    """Logs a run with `Wandb` or `Mlflow`: figures of steps and epochs, the plan, checkpoints' paths, and how it ended.

    Checkpoints keep the tracker's run: a training that resumes goes on in it and logs no update twice. A training
    that cannot open its run does not start. From then on the tracker's errors do not end it: the first one is a
    `TrackingWarning`, and at the end a second one tells how much is missing. A training that resumes goes on even where
    its run cannot be opened.
    """

    def __init__(
        self, service: Service, config: Mapping[str, Any] | None = None, *, upload_checkpoints: bool = False
    ) -> None:
        """Nothing is sent yet.

        Args:
            config: plain values by name that describe the run, next to the plan and versions.
            upload_checkpoints: whether checkpoints are copied to the tracker, besides their paths.
        """
        self.service: Service = service
        self.config: dict[str, Any] = dict(config or {})
        self.upload_checkpoints: bool = upload_checkpoints
        self.run: TrackedRun | None = None  # on rank 0
        self.warned: bool = False

    def on_start(self, trainer: TrainerView) -> None:
        """Raise a UsageError if a run that starts cannot be opened in the tracker."""
        self.run, self.warned = None, False
        run_id = run_on_rank_zero(partial(self.open, trainer), trainer.pm.broadcast_from_rank0)
        if run_id is not None:
            trainer.run_ids[self.service.title] = run_id

    def open(self, trainer: TrainerView) -> str | None:
        """ID of the tracker's run, which is open from now on; the earlier ID, if any, where it cannot be opened."""
        earlier = trainer.run_ids.get(self.service.title)
        try:
            self.run = self.service.open(earlier, description(trainer.pm.plan, self.config))
        except Exception as error:
            failure = f"{self.service.title} cannot open a run: {said(error)} {self.service.hint}"
            if trainer.resumed is None:
                raise UsageError(failure) from error
            self.warn(f"{failure} The training goes on without it.")
            return earlier
        return self.run.id

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        del trainer
        if self.run is not None and report.update > self.run.logged.update:
            self.attempt(partial(self.run.log, scalars(STEPS, report), report.update), f"update {report.update}")

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        del trainer
        if self.run is not None and report.epoch > self.run.logged.epoch:
            self.attempt(partial(self.run.log, scalars(EPOCHS, report), report.update), f"epoch {report.epoch}")

    def on_checkpoint(self, trainer: TrainerView, folder: Path) -> None:
        if self.run is None:
            return
        update, path = trainer.position.update, folder.absolute()
        self.attempt(partial(self.run.refer, folder.name, path, update), f"checkpoint {folder}")
        if self.upload_checkpoints:
            self.attempt(partial(self.run.upload, folder.name, path, update), f"upload of checkpoint {folder}")

    def on_end(self, trainer: TrainerView) -> None:
        if self.run is None:
            return
        run, self.run = self.run, None
        figures = summary(trainer.position, trainer.history, trainer.best)
        self.attempt(partial(run.finish, figures, status_of(trainer.error), trainer.position.update), "end of the run")
        if run.num_lost:
            self.warn(f"{self.service.title} lacks {run.num_lost} of this run's reports.")

    def attempt(self, act: Callable[[], None], what: str) -> None:
        """Call the tracker's library; the first error is a `TrackingWarning`, further ones are not repeated."""
        try:
            act()
        except Exception as error:
            if not self.warned:
                self.warn(
                    f"{self.service.title} failed at {what}: {said(error)} This does not stop the training; further "
                    "failures are counted and reported at its end."
                )
            self.warned = True

    def warn(self, message: str) -> None:
        warnings.warn(message, TrackingWarning, stacklevel=caller_level())


def said(error: Exception) -> str:
    """An error as one sentence of a message."""
    words = " ".join(str(error).split()).removesuffix(".")
    return f"{type(error).__name__}: {words}." if words else f"{type(error).__name__}."


def status_of(error: BaseException | None) -> Status:
    """Status of a run that ended with this error: Ctrl-C and SIGTERM kill it."""
    if error is None:
        return "finished"
    return "killed" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
