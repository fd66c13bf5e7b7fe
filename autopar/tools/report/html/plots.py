"""Plotly, which is an extra, and the layout that all figures share."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from autopar.errors import UsageError
from autopar.tools.report.html.palette import GRID, INK, MUTED

ROW_PIXELS, MIN_ROW_PIXELS, ROWS_PIXELS = 34, 13, 620
TITLE_PIXELS = 118  # of a figure's height: legend, axis and margins
BAR_WIDTH = 0.86  # of a row
LEGEND: Mapping[str, Any] = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"}


@dataclass(frozen=True)
class Figure:
    """A figure of a report.

    Args:
        name: its id in the page.
        label: what it shows, for those who do not see it.
        traces, layout: plotly's, as JSON types.
        caption: how to read it.
    """

    name: str
    label: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    caption: str


def needed_plotly() -> None:
    """Raise a UsageError if plotly is not installed."""
    try:
        importlib.import_module("plotly")
    except ImportError as error:
        raise UsageError(f"autopar report needs plotly: pip install 'autopar[report]'. ({error})") from error


def layout(height: int, **more: Any) -> dict[str, Any]:
    """Layout of a figure that is so many pixels high and as wide as the page."""
    return {
        "height": height,
        "font": {"family": "system-ui, sans-serif", "size": 14, "color": INK},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "legend": LEGEND,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": MUTED, "activecolor": INK},
    } | more


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with a grid; its labels never overlap the figure's edge."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 14}},
        "ticklabelstandoff": 4,
        "automargin": True,
        "gridcolor": GRID,
        "zeroline": False,
    } | more


def row_axis(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Vertical axis of rows of bars, the first one at the top."""
    rows = len(names)
    return axis(
        range=[rows - 0.5, -0.5], tickmode="array", tickvals=list(range(rows)), ticktext=list(names), showgrid=False,
        **more,
    )  # fmt: skip


def rows_height(rows: int) -> int:
    """Pixels of a figure with so many rows of bars."""
    return TITLE_PIXELS + rows * max(MIN_ROW_PIXELS, min(ROW_PIXELS, ROWS_PIXELS // max(1, rows)))


def plain(name: str) -> str:
    """A name inside of a figure, without plotly's tags."""
    return escape(name, quote=False)


def hover(texts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Part of a trace: what the page shows where a pointer is on one of its marks.

    Args:
        texts: lines for each mark, the first one bold.
    """
    return {"hoverinfo": "none", "hovertext": ["\n".join(lines) for lines in texts]}
