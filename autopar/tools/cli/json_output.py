"""Results as JSON, alone on standard output; ``docs/command_line.md`` lists their keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

import typer

from autopar.ir.terminal import is_quiet

STDOUT: ContextVar[TextIO | None] = ContextVar("STDOUT", default=None)  # of the process, where JSON alone goes to it


def prints_json(function: Callable[..., None]) -> Callable[..., None]:
    """The command, of which under ``--json`` only what `show_json` prints is on standard output.

    Progress, remarks and what the user's model prints go to standard error; nowhere under ``--quiet``.
    """

    @wraps(function)
    def command(*args: Any, as_json: bool = False, **values: Any) -> None:
        if not as_json:
            return function(*args, as_json=as_json, **values)
        token = STDOUT.set(sys.stdout)
        try:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere if is_quiet() else sys.stderr):
                function(*args, as_json=as_json, **values)
        finally:
            STDOUT.reset(token)

    return command


def show_json(value: Any) -> None:
    """Print a result as JSON, dataclasses by their fields; numbers that are not finite are null.

    Args:
        value: a text is JSON already.
    """
    from pydantic_core import to_json

    text = value.rstrip() if isinstance(value, str) else to_json(value, indent=2, inf_nan_mode="null").decode()
    typer.echo(text, file=STDOUT.get())
