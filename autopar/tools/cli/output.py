"""What commands print and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console, RenderableType

from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.ir.table import plan_text
from autopar.ir.text import rendered

PIPE_WIDTH, MAX_WIDTH = 100, 120


def show(parts: Sequence[RenderableType]) -> None:
    """Print tables as wide as the terminal is, in colour where it has any."""
    typer.echo(rendered(parts, *screen()))


def show_plan(plan: Plan) -> None:
    """Print a plan."""
    typer.echo(plan_text(plan, *screen()))


def screen() -> tuple[int, bool]:
    """Columns to fill, and whether to use colours."""
    console = Console()
    if not console.is_terminal:
        return PIPE_WIDTH, False
    return min(console.width, MAX_WIDTH), not console.no_color


def check_writable(path: Path) -> None:
    """Raise a UsageError now if a file cannot be written later, or must not be, because it would damage a checkpoint.

    A file that is there is left as it is.
    """
    from autopar.runtime.checkpoint.folder import (
        checkpoint_around,  # with torch, which takes longer to import than printing needs
    )

    checkpoint = checkpoint_around(path)
    if checkpoint is not None:
        raise UsageError(
            f"Cannot write to {path}: it lies in the checkpoint {checkpoint}, whose files must stay as they were "
            "saved. Give a file outside of that folder."
        )
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.resolve().unlink()  # not a link that names it
    except OSError as error:
        raise UsageError(
            f"Cannot write to {path}: {error.strerror}. Give a file in a folder that exists and can be written to."
        ) from error


def check_files(files: Mapping[str, Path | None]) -> None:
    """Raise a UsageError now if what flags name cannot be written later, or is one file twice."""
    flags: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        check_writable(path)
        other = flags.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(f"{other} and {flag} both write to {path}. Give each a file of its own.")


def write(path: Path, text: str) -> None:
    """Write a text.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"Cannot write the result to {path}: {error.strerror}.") from error


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        plan.save(path)
    except OSError as error:
        raise UsageError(
            f"Cannot write the plan to {path}: {error.strerror}. Give a file in a folder that exists."
        ) from error
