"""Helpers of printed tables: rendering, columns, wrapping; independent of their content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console, OverflowMethod, RenderableType
from rich.table import Column, Table
from rich.text import Text

LABEL_CELLS = 10
NONE = "–"  # cell without a value


def rendered(parts: Sequence[RenderableType], width: int, color: bool) -> str:
    """Rich parts as text, one below the other, without spaces at line ends."""
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
        markup=False,  # names of models and operations may have brackets and colons
        emoji=False,
        force_jupyter=False,  # a notebook's would show the text at once, in addition to its caller
        record=True,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in console.export_text(styles=color).rstrip().splitlines())


def plain_table(*columns: Column | str) -> Table:
    """A table without rows, with a line below its header and two spaces between columns."""
    return Table(
        *columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold"
    )


def numeric(*titles: str, no_wrap: bool = False, overflow: OverflowMethod = "ellipsis") -> list[Column]:
    """Right-justified columns of a `plain_table`."""
    return [Column(title, justify="right", no_wrap=no_wrap, overflow=overflow) for title in titles]


def labelled(rows: Sequence[tuple[str, str]]) -> Table:
    """Lines of label and text; the texts form one column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", min_width=LABEL_CELLS)
    table.add_column(overflow="fold")
    for label, content in rows:
        table.add_row(label, Text(content))
    return table


def wrapped(path: str, width: int) -> str:
    """Module paths on as many lines as they need.

    Lines are broken at spaces. A path longer than a line is also broken after its dots.
    """
    lines = [""]
    for word in path.split(" "):
        for i, piece in enumerate([word] if len(word) <= width else re.findall(r"[^.]+\.?", word)):
            joined = f"{lines[-1]} {piece}" if i == 0 and lines[-1] else lines[-1] + piece
            if len(joined) > width and lines[-1]:
                lines.append(piece)
            else:
                lines[-1] = joined
    return "\n".join(lines)
