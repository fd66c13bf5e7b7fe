"""Flags of ``autopar train`` for experiment trackers; those of Weights & Biases have the names of timm's script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

if TYPE_CHECKING:
    from autopar.train import Tracker


EMPTY = (None, (), [])  # values of flags that were not given


@dataclass(frozen=True)
class TrackingFlags:
    """Experiment trackers, besides TensorBoard's files."""

    log_wandb: Annotated[
        bool,
        Option("--log-wandb", help="Log to Weights & Biases; to this disk alone if $WANDB_MODE is offline."),
    ] = False
    wandb_project: Annotated[
        str | None, Option(help="Project in Weights & Biases; $WANDB_PROJECT by default.", metavar="NAME")
    ] = None
    wandb_tags: Annotated[
        list[str] | None, Option(help="Labels of the run in Weights & Biases.", metavar="NAME ...")
    ] = None
    wandb_resume_id: Annotated[
        str | None,
        Option(help="Run of Weights & Biases to go on with; by default that of the resumed checkpoint.", metavar="ID"),
    ] = None
    log_mlflow: Annotated[
        bool, Option("--log-mlflow", help="Log to MLflow, into the store that MLFLOW_TRACKING_URI names.")
    ] = False
    mlflow_experiment: Annotated[
        str | None, Option(help="Experiment in MLflow; $MLFLOW_EXPERIMENT_NAME, or Default.", metavar="NAME")
    ] = None
    upload_checkpoints: Annotated[
        bool, Option("--upload-checkpoints", help="Copy checkpoints to the trackers, which otherwise get their paths.")
    ] = False

    def trackers(self, folder: Path, flags: Mapping[str, Any]) -> list[Tracker]:
        """A callback for each tracker that was asked for.

        Args:
            folder: the run's; its name is that of the run in the trackers.
            flags: values of all flags by name. Trackers get those that say something about the training.

        Raises:
            UsageError: a tracker's library is not installed.
        """
        from autopar.train import Mlflow, Tracker, Wandb

        of_trackers = {field.name for field in fields(TrackingFlags)} | {"as_json", "overwrite", "val_only"}
        config = {name: value for name, value in flags.items() if name not in of_trackers and value not in EMPTY}
        services: list[Wandb | Mlflow] = []
        name = folder.resolve().name
        if self.log_wandb:
            services.append(Wandb(self.wandb_project, name, tuple(self.wandb_tags or ()), self.wandb_resume_id, folder))
        if self.log_mlflow:
            services.append(Mlflow(self.mlflow_experiment, name))
        return [Tracker(service, config, upload_checkpoints=self.upload_checkpoints) for service in services]
