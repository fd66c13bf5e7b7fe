"""Weights & Biases: a run there, online or offline as WANDB_MODE says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.train.timm_optional import needed
from autopar.train.trackers.scalars import EPOCH, EPOCHS, UPDATE
from autopar.train.trackers.tracker import Logged, Status
from autopar.train.trackers.wandb_files import history

FINISH_SECONDS = 300.0  # a rank that waits for uploads holds its GPU, and other ranks wait for it
EXIT_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "killed": 255}  # 255 is wandb's own for Ctrl-C


@dataclass(frozen=True)
class Wandb:
    """Run of Weights & Biases, for `Tracker`.

    The library reads its environment variables (WANDB_MODE=offline, WANDB_ENTITY, WANDB_BASE_URL, …). Figures are
    written to disk and uploaded by a process of its own: a network that fails does not hold up the training, and
    ``wandb sync`` uploads the rest later. At the end of the run uploads are waited for, 300 s at most;
    WANDB_FINISH_TIMEOUT changes that. With wandb versions that lack this setting they are waited for without limit.

    Args:
        project: the project; by default $WANDB_PROJECT, or a name that wandb makes up from the script's folder.
        name: the run's name in lists; two random words by default.
        tags: labels of the run.
        run_id: the run to go on with, or the ID of a new one; by default the checkpoint's run, or a new one.
        folder: folder in which wandb makes its own, ``wandb``; by default $WANDB_DIR, or the working directory.
    """

    project: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    run_id: str | None = None
    folder: Path | None = None
    title = "Weights & Biases"
    hint = "Log in with `wandb login`, or set WANDB_MODE=offline and upload later with `wandb sync`."

    def __post_init__(self) -> None:
        """Raise a UsageError if wandb is not installed."""
        needed("wandb", "Wandb", extra="tracking")

    def open(self, run_id: str | None, config: Mapping[str, Any]) -> WandbRun:
        wandb = needed("wandb", "Wandb", extra="tracking")
        settings = {}
        if "finish_timeout" in wandb.Settings.model_fields and wandb.setup().settings.finish_timeout == 0:
            settings = {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True}
        folder = None if self.folder is None else self.folder.absolute()  # wandb resolves paths once for a process
        run = wandb.init(
            project=self.project, name=self.name, tags=self.tags or None, dir=folder, settings=settings,
            id=self.run_id or run_id, resume="allow",
        )  # fmt: skip
        run.config.update(dict(config), allow_val_change=True)  # a run may resume on another mesh
        run.define_metric(f"{EPOCHS}/*", step_metric=EPOCH)
        return WandbRun(run, logged_by(run))


def logged_by(run: Any) -> Logged:
    """How far earlier attempts logged a run: what the server says, or offline the files on this disk."""
    rows = [dict(run.summary)] if run.resumed else []
    if run.offline:
        for path in Path(run.settings.wandb_dir).glob(f"offline-run-*-{run.id}/run-{run.id}.wandb"):
            rows += history(path)
    return Logged(*(max((int(row[name]) for row in rows if name in row), default=0) for name in (UPDATE, EPOCH)))


class WandbRun:
    """A run of Weights & Biases that is open for writing. An update is a step of its history."""

    def __init__(self, run: Any, logged: Logged) -> None:
        self.run, self.logged, self.num_lost = run, logged, 0
        self.step = max(run.step, logged.update + 1)  # the first that can still be logged

    @property
    def id(self) -> str:
        return self.run.id

    def log(self, figures: Mapping[str, float], update: int) -> None:
        self.step = max(update, self.step)  # an epoch whose evaluation a resumed run repeats comes with the next update
        try:
            self.run.log(dict(figures), step=self.step)
        except Exception:
            self.num_lost += 1
            raise

    def refer(self, name: str, folder: Path, update: int) -> None:
        self.run.summary.update({f"checkpoint/{name}": str(folder), f"checkpoint/{name}_update": update})

    def upload(self, name: str, folder: Path, update: int) -> None:
        wandb = needed("wandb", "Wandb", extra="tracking")
        artifact = wandb.Artifact(f"{self.id}-{name}", "checkpoint", metadata={"update": update})
        artifact.add_dir(str(folder))
        self.run.log_artifact(artifact, aliases=["latest", name, f"update-{update}"])

    def finish(self, figures: Mapping[str, float], status: Status, update: int) -> None:
        del update
        try:
            self.run.summary.update({**figures, "summary/status": status})
        finally:
            self.run.finish(EXIT_CODES[status])
