"""A progress bar in a notebook, which has no terminal: one output of a cell, replaced while the bar moves."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from autopar.ir.html import preformatted
from autopar.ir.text import rendered

if TYPE_CHECKING:  # imports of Rich take longer than the list of commands
    from rich.progress import Progress

REFRESH_SECONDS = 0.25
BAR_COLUMNS = 120


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    from rich.console import Console

    return Console().is_jupyter


class NotebookBar:
    """Shows a rich bar that is not started; needs no widgets. Outside of notebooks it shows nothing.

    Files of the notebook keep the last state.
    """

    def __init__(self, bar: Progress) -> None:
        self.bar, self.is_shown = bar, in_notebook() and not bar.console.quiet
        self.handle: Any = None  # of the output; made by the first refresh
        self.shown_seconds = -inf

    def refresh(self, now: bool = False) -> None:
        """Show the bar's state, at most every `REFRESH_SECONDS` unless ``now``."""
        seconds = self.bar.get_time()
        if not self.is_shown or (not now and seconds - self.shown_seconds < REFRESH_SECONDS):
            return
        self.shown_seconds = seconds
        content = self.bar.get_renderable()
        self.show(preformatted(content, BAR_COLUMNS), rendered([content], BAR_COLUMNS, color=False))

    def show(self, html: str, text: str) -> None:
        """Replace the output."""
        from IPython.display import display  # where there is a notebook, there is IPython

        content = {"text/html": html, "text/plain": text}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)
