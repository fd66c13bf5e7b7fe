"""Printing and writing of the commands' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.console import RenderableType

from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.ir.table import plan_text
from autopar.ir.terminal import has_colors, is_quiet, text_width
from autopar.ir.text import rendered
from autopar.runtime.checkpoint.folder import checkpoint_around


def show(parts: Sequence[RenderableType]) -> None:
    """Print tables in the width of the terminal, coloured if it has colours."""
    typer.echo(rendered(parts, *screen()), color=has_colors())


def show_plan(plan: Plan) -> None:
    """Print a plan."""
    typer.echo(plan_text(plan, *screen()), color=has_colors())


def screen() -> tuple[int, bool]:
    """Number of columns, and whether to use colours."""
    return text_width(), has_colors()


def remark(text: str, err: bool = False) -> None:
    """Print a line that is no result; nothing under ``--quiet``."""
    if not is_quiet():
        typer.echo(text, err=err)


def check_writable(path: Path) -> None:
    """Raise a UsageError before the work if a file cannot be written, or would damage a checkpoint.

    An existing file stays unchanged.
    """
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
            path.resolve().unlink()  # the file, not a link to it
    except OSError as error:
        raise UsageError(
            f"Cannot write to {path}: {error.strerror}. Give a file in a folder that exists and can be written to."
        ) from error


def check_files(files: Mapping[str, Path | None]) -> None:
    """Raise a UsageError before the work if a flag's file cannot be written, or two flags name one file."""
    flags: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        check_writable(path)
        other = flags.setdefault(path.resolve(), flag)
        if other != flag:
            raise UsageError(f"{other} and {flag} both write to {path}. Give each a file of its own.")


def write(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        UsageError: the file cannot be written.
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
