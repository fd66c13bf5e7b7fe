"""What a run keeps in its folder: the names, what an earlier one left there, and its removal."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import CheckpointError, UsageError
from autopar.ir.units import plural
from autopar.runtime.checkpoint.folder import is_checkpoint, read_header, remove_checkpoint

LAST, BEST = "last", "best"
STEPS, EPOCHS = "steps.jsonl", "history.jsonl"
WEIGHTS, EMA_WEIGHTS, PLAN = "model.safetensors", "model_ema.safetensors", "plan.json"
TENSORBOARD = "tensorboard"
EVENTS = "events.out.tfevents.*"  # as SummaryWriter names its files


def last_of(folder: Path) -> Path:
    """The checkpoint that a folder stands for: the last one of a run's folder, or the folder itself."""
    return folder / LAST if (folder / LAST).is_dir() else folder


def make_folder(folder: Path) -> None:
    """Create a folder for results.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot make the folder {folder}: {error.strerror}. Choose another --output.") from error


def lies_in(checkpoint: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of the run in this folder; either of them may be a link."""
    return folder.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)


def checkpoints_in(folder: Path) -> list[str]:
    """``checkpoint last after 16 updates``, for each that a run left in its folder."""
    return [f"checkpoint {name} {age(folder / name)}" for name in (LAST, BEST) if is_checkpoint(folder / name)]


def age(checkpoint: Path) -> str:
    try:
        return f"after {plural(read_header(checkpoint).updates, 'update')}"
    except CheckpointError:
        return "(unreadable)"


def logs_in(folder: Path) -> list[str]:
    """``steps.jsonl of 16 updates``, for each log with a line.

    Empty ones are nothing. They are what remains of a run that failed before its first update, out of memory or over
    its data: it can be started again as if it had not been. A log with lines counts although there may be no checkpoint
    to go on from: it may be all that shows why a run went wrong.
    """
    found = []
    for name, what in ((STEPS, "update"), (EPOCHS, "epoch")):
        path = folder / name
        if path.is_file() and path.stat().st_size > 0:
            with path.open("rb") as file:
                found.append(f"{name} of {plural(sum(1 for _ in file), what)}")
    return found


def run_in(folder: Path) -> list[str]:
    """What a new run in this folder would replace: checkpoints, logs and exported weights, in words; often nothing.

    Plans do not count: they may be there for ``--plan``, and making one again costs seconds.
    """
    weights = [name for name in (WEIGHTS, EMA_WEIGHTS) if (folder / name).exists()]
    return [*checkpoints_in(folder), *logs_in(folder), *weights]


def check_free(folder: Path, *, go_on: str, instead: str) -> None:
    """Raise a UsageError if a run is in a folder.

    Args:
        go_on: how to go on from a checkpoint; ``{}`` stands for its path.
        instead: what else to do.
    """
    found = run_in(folder)
    if not found:
        return
    checkpoints = [folder / name for name in (LAST, BEST) if is_checkpoint(folder / name)]
    on = f"Go on with it by {go_on.format(checkpoints[0])}, " if checkpoints else "It has no checkpoint to go on from: "
    raise UsageError(f"{folder} holds a run already: {', '.join(found)}. {on}{instead}")


def remove_run(folder: Path) -> None:
    """Remove what a run wrote into its folder: checkpoints, logs, exported weights, TensorBoard's events; nothing else.

    Under torchrun one rank makes the call: ``if leads(): remove_run(folder)``.

    Raises:
        CheckpointError: another process is saving one of the checkpoints at this moment.
        UsageError: something cannot be removed.
    """
    try:
        for name in (LAST, BEST):
            remove_checkpoint(folder / name)
        for name in (STEPS, EPOCHS, WEIGHTS, EMA_WEIGHTS):
            (folder / name).unlink(missing_ok=True)
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
