"""Folder of a training run: file names, detection of an earlier run, and its removal."""

from __future__ import annotations

import warnings
from pathlib import Path

from autopar.errors import ResumeWarning, UsageError, caller_level
from autopar.ir.files import TEMPORARY
from autopar.ir.units import plural
from autopar.runtime.checkpoint.folder import age, is_checkpoint, remove_checkpoint, save_folder

LAST, BEST = "last", "best"
STEPS, EPOCHS = "steps.jsonl", "history.jsonl"
WEIGHTS, EMA_WEIGHTS, PLAN = "model.safetensors", "model_ema.safetensors", "plan.json"
TENSORBOARD = "tensorboard"
EVENTS = "events.out.tfevents.*"  # file names of SummaryWriter


def last_of(folder: Path) -> Path:
    """The checkpoint ``last`` in a run's folder; a folder without one stands for itself."""
    return folder / LAST if (folder / LAST).is_dir() else folder


def make_folder(folder: Path) -> None:
    """Create a folder for results.

    Raises:
        UsageError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot make the folder {folder}: {error.strerror}. Choose another --output.") from error


def lies_in(checkpoint: Path, folder: Path) -> bool:
    """Whether a checkpoint, or one that is kept with it, belongs to the run in a folder; both paths may be links."""
    checkpoint = save_folder(checkpoint)
    return folder.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)


def checkpoints_in(folder: Path) -> list[str]:
    """Descriptions of the checkpoints in a run's folder, such as ``checkpoint last after 16 updates``."""
    return [f"checkpoint {name} {age(folder / name)}" for name in (LAST, BEST) if is_checkpoint(folder / name)]


def logs_in(folder: Path) -> list[str]:
    """Descriptions of the logs with at least one line, such as ``steps.jsonl of 16 updates``.

    Empty logs do not count: they remain of a run that failed before its first update, which may simply be started
    again. A log with lines counts even without a checkpoint, since it may be the only record of why a run failed.
    """
    logs = []
    for name, what in ((STEPS, "update"), (EPOCHS, "epoch")):
        path = folder / name
        if path.is_file() and path.stat().st_size > 0:
            with path.open("rb") as file:
                logs.append(f"{name} of {plural(sum(1 for _ in file), what)}")
    return logs


def run_in(folder: Path) -> list[str]:
    """Descriptions of what a new run in this folder would replace: checkpoints, logs and exported weights.

    Plan files do not count: they may be there for ``--plan``, and planning again takes seconds.
    """
    weights = [name for name in (WEIGHTS, EMA_WEIGHTS) if (folder / name).exists()]
    return [*checkpoints_in(folder), *logs_in(folder), *weights]


def check_free(folder: Path, *, go_on: str, instead: str) -> None:
    """Raise a UsageError if a folder holds a run.

    Args:
        go_on: how to resume from a checkpoint, for the message; ``{}`` stands for its path.
        instead: the alternative, for the message.
    """
    contents = run_in(folder)
    if not contents:
        return
    checkpoints = [folder / name for name in (LAST, BEST) if is_checkpoint(folder / name)]
    on = f"Go on with it by {go_on.format(checkpoints[0])}, " if checkpoints else "It has no checkpoint to go on from: "
    raise UsageError(f"{folder} holds a run already: {', '.join(contents)}. {on}{instead}")


def check_no_weights(folder: Path, instead: str) -> None:
    """Raise a UsageError if a folder without checkpoints has weights: a finished run, which must not be lost."""
    if any((folder / name).exists() for name in (WEIGHTS, EMA_WEIGHTS)):
        check_free(folder, go_on="{}", instead=instead)


def start_again(folder: Path) -> None:
    """Remove what a run left that ended before its first checkpoint, with a `ResumeWarning`."""
    contents = run_in(folder)
    remove_run(folder)
    if contents:
        warnings.warn(
            f"The run in {folder} had ended before its first checkpoint: it starts again, and replaces "
            f"{', '.join(contents)}.",
            ResumeWarning,
            stacklevel=caller_level(),
        )


def remove_run(folder: Path) -> None:
    """Remove the files of a run: checkpoints, logs, exported weights, TensorBoard's events; nothing else.

    Under torchrun one rank calls it: ``if is_rank_zero(): remove_run(folder)``.

    Raises:
        CheckpointError: another process is saving one of the checkpoints.
        UsageError: a file cannot be removed.
    """
    try:
        for name in (LAST, BEST):
            remove_checkpoint(folder / name)
        for name in (STEPS, EPOCHS, WEIGHTS, EMA_WEIGHTS):
            (folder / name).unlink(missing_ok=True)
            (folder / (name + TEMPORARY)).unlink(missing_ok=True)
        events = folder / TENSORBOARD
        for path in (*folder.glob(EVENTS), *events.glob(EVENTS)):
            path.unlink()
        if events.is_dir() and not events.is_symlink() and not any(events.iterdir()):
            events.rmdir()
    except OSError as error:
        raise UsageError(
            f"Cannot remove the run in {folder}: {error.filename}: {error.strerror}. Remove it yourself, or choose "
            "another folder."
        ) from error
