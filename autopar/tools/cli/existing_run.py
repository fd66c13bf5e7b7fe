"""Earlier run in the ``--output`` of ``autopar train``: what is resumed or removed, and how it is resumed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from autopar.errors import UsageError
from autopar.runtime.launch.environment import broadcast_from_rank0, launched
from autopar.tools.cli.output import remark
from autopar.train import (
    LAST,
    Trainer,
    check_free,
    is_rank_zero,
    last_of,
    lies_in,
    make_folder,
    remove_run,
    run_in,
    run_on_rank_zero,
)
from autopar.train.run.state import latest_by_rank_zero

AUTO = "auto"  # of --resume
INSTEAD = "choose another --output, or pass --overwrite without --resume to remove the run and start over."


def check_folder(folder: Path, checkpoint: Path | None, overwrite: bool) -> None:
    """Check the folder for results before anything is planned.

    Args:
        checkpoint: checkpoint to resume from.
        overwrite: whether an earlier run may be removed.

    Raises:
        UsageError: the folder has an earlier run that is neither resumed nor may be removed, or both are requested.
    """
    goes_on = checkpoint is not None and lies_in(checkpoint, folder)
    if goes_on and overwrite:
        raise UsageError(
            f"--resume goes on from {checkpoint}, which --overwrite would remove with the rest of the run in {folder}. "
            "Leave one of them out, or choose another --output."
        )
    if not goes_on and not overwrite:
        check_free(
            folder,
            go_on="--resume {}",
            instead="choose another --output, or pass --overwrite to remove it and start over.",
        )


@contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """Within ``with``, the folder for results exists on rank 0; afterwards, folders that are new and empty are removed.

    Raises:
        UsageError: the folder cannot be created.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()] if is_rank_zero() else []
    try:
        if is_rank_zero():
            make_folder(folder)
        yield
    finally:
        with suppress(OSError):  # a folder with files stays, and so do those around it
            for each in new:
                each.rmdir()


def remove_earlier(folder: Path) -> None:
    """Remove the run in a folder and print what was removed."""
    found = run_in(folder)
    remove_run(folder)
    if found:
        remark(f"Removed the earlier run in {folder}: {', '.join(found)}.\n")


def resumed_checkpoint(folder: Path, resume: str | None, overwrite: bool) -> Path | None:
    """Checkpoint from which a run resumes; None if it starts. Nothing is planned or removed yet.

    Args:
        folder: the folder for results.
        resume, overwrite: the values of the flags.

    Raises:
        UsageError: there is none where ``--resume`` says, or the folder for results has a run that is not resumed.
        CheckpointError: the last checkpoint is damaged, with ``--resume auto``.
    """
    if resume == AUTO and overwrite:
        raise UsageError(
            "--resume auto goes on with the run in --output, --overwrite would remove it. Leave one of them out."
        )
    if resume == AUTO:
        return latest_by_rank_zero(folder, INSTEAD, broadcast_from_rank0)
    checkpoint = checkpoint_of(Path(resume)) if resume is not None else None
    run_on_rank_zero(partial(check_folder, folder, checkpoint, overwrite), broadcast_from_rank0)
    return checkpoint


def checkpoint_of(path: Path) -> Path:
    """Checkpoint that ``--resume`` names: a run's last one, or the folder itself.

    Raises:
        UsageError: there is no such folder.
    """
    if not path.is_dir():
        raise UsageError(
            f"--resume {path}: there is no such folder. Give a checkpoint, such as runs/MODEL/{LAST}, or the --output "
            "of an earlier run."
        )
    return last_of(path)


def farewell(trainer: Trainer) -> str:
    """Message about an interrupted run: where it stopped, what is saved, and the command that resumes it."""
    position, saved = trainer.position, trainer.saved
    if position.epoch > trainer.epochs and saved == position:
        return f"Interrupted after the last epoch. `autopar export {trainer.checkpoint}` writes the weights."
    where = f"Interrupted in epoch {position.epoch}, after {position.step} of {position.steps} updates"
    if trainer.checkpoint is None or saved is None:
        return f"{where}. Nothing is saved."
    what = "all of it" if saved == position else f"epoch {saved.epoch}, after {saved.step} of {saved.steps} updates,"
    launch = launched()
    under = f" under {launch.launcher}" if launch is not None else ""
    return f"{where}; {what} is saved. Go on{under} with\n{command(trainer.checkpoint)}"


def command(checkpoint: Path) -> str:
    """This process's command line, changed so that it resumes from a checkpoint."""
    pairs = [(word, before) for word, before in zip(sys.argv[1:], sys.argv) if word != "--overwrite"]
    words = [word for word, before in pairs if "--resume" not in (word, before) and not word.startswith("--resume=")]
    return shlex.join(["autopar", *words, "--resume", str(checkpoint)])
