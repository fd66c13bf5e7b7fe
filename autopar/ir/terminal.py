"""Terminal of the user: its width, its colours, and how much to print there.

Colours follow https://no-color.org and https://force-color.org, as Rich reads them: none under NO_COLOR, in a pipe or
in a dumb terminal, always under FORCE_COLOR.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports of Rich take longer than the list of commands
    from rich.console import Console

QUIET_VARIABLE = "AUTOPAR_QUIET"  # of the environment; `--quiet` sets it
PIPE_WIDTH, MAX_WIDTH = 100, 120


def is_quiet() -> bool:
    """Whether progress and remarks are switched off, by ``--quiet`` or by the environment's AUTOPAR_QUIET=1."""
    return os.environ.get(QUIET_VARIABLE, "") not in ("", "0")


def has_colors(stderr: bool = False) -> bool:
    """Whether text on standard output, or on standard error, may be coloured."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console.color_system is not None and not console.no_color


def text_width() -> int:
    """Columns for text on standard output: the terminal's up to `MAX_WIDTH`, and `PIPE_WIDTH` elsewhere."""
    from rich.console import Console

    return min(Console().width, MAX_WIDTH) if sys.stdout.isatty() else PIPE_WIDTH


def progress_console(stderr: bool = True, quiet: bool = False) -> Console:
    """Console for progress: prints nothing under `is_quiet`, and is interactive where a bar can move.

    A bar cannot move in a dumb terminal, nor in a pipe whose colours FORCE_COLOR switches on.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    moves = None if stream.isatty() else False
    options = {"force_interactive": moves, "force_jupyter": False}  # a notebook gets plain lines, as a log does
    return Console(stderr=stderr, highlight=False, quiet=quiet or is_quiet(), **options)
