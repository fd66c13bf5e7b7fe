"""Size, letters and colours of the pictures of docs/concepts."""

from __future__ import annotations

from typing import Any

from autopar.tools.report.figure import needed_figure

HARDWARE = "h200-nvlink"
WIDTH_INCHES = 7.6  # of a page's text, where letters are as large as the text's
SMALL, NORMAL = 7.5, 8.5  # points
BLUE, ORANGE, GREEN, RED, PALE = "#1b6ca8", "#c2731d", "#3c8f4f", "#b23a48", "#c9ced3"


def new_figure(height_inches: float) -> Any:
    """Matplotlib figure as wide as a page."""
    return needed_figure()(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
