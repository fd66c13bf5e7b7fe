"""Check and removal of an earlier run in the ``--output`` of ``autopar train``."""

from __future__ import annotations

from pathlib import Path

import typer

from autopar.errors import UsageError
from autopar.train import check_free, lies_in, remove_run, run_in


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


def remove_earlier(folder: Path) -> None:
    """Remove the run in a folder and print what was removed."""
    found = run_in(folder)
    remove_run(folder)
    if found:
        typer.echo(f"Removed the earlier run in {folder}: {', '.join(found)}.\n")
