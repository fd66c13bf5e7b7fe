"""Progress of timing regions on stderr: a bar in a terminal, otherwise a line for each model and batch."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.ir.units import plural


class RegionProgressBar:
    """The progress callback of a `RegionTimer`; the bar appears with the first region and disappears after the last."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if not self.console.is_terminal:
            if done == 0:
                print(f"timing {plural(total, 'region')} of {what}", file=sys.stderr)
            return
        if done == 0:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.start()
            self.bar.add_task(f"timing {what}", total=total)
        assert self.bar is not None
        self.bar.update(self.bar.task_ids[0], completed=done)
        if done == total:
            self.bar.stop()
