"""Status: a line on standard error that says what a long call is doing, once it has taken `DELAY_SECONDS`.

In a terminal it is updated, and vanishes at the end. Elsewhere, as in the log of a job, a line is printed at most every
`LINE_SECONDS`. ``--quiet`` and AUTOPAR_QUIET=1 switch it off. Under a launcher the first process shows it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from autopar.ir.terminal import progress_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

DELAY_SECONDS, LINE_SECONDS = 3.0, 10.0


@contextmanager
def showing_status(text: str) -> Iterator[None]:
    """Within ``with``, a status is shown: first ``text``, then what `doing` was told last.

    Within another one it goes on with that one's line.
    """
    if CURRENT.get() is not None:
        doing(text)
        yield
        return
    console = progress_console(quiet=not is_first_process())
    console.file = sys.stderr  # which traces replace for a while
    status = Status(console, text)
    token = CURRENT.set(status)
    try:
        with status.shown():
            yield
    finally:
        CURRENT.reset(token)


def doing(text: str) -> None:
    """Change the text of the status, if one is shown."""
    if (status := CURRENT.get()) is not None:
        status.update(text)


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun or srun started."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


class Status:
    """A status that is shown from a thread of its own, since the caller is busy.

    Args:
        console: prints nothing if it is quiet.
        wait: waits for so many seconds; returns whether the call has ended. Default: wait for the end of `shown`.
    """

    def __init__(self, console: Console, text: str, wait: Callable[[float], bool] | None = None) -> None:
        self.console, self.text = console, text
        self.ended, self.lock = Event(), Lock()
        self.wait = wait or self.ended.wait
        self.bar: Progress | None = None

    def update(self, text: str) -> None:
        """Change the text."""
        self.text = text
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=text)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within ``with``, the status is shown."""
        if self.console.quiet:
            yield
            return
        thread = Thread(target=self.run, name="autopar status", daemon=True)
        thread.start()
        try:
            with self.warnings_above():
                yield
        finally:
            self.ended.set()
            thread.join()
            if self.bar is not None:
                self.bar.stop()

    def run(self) -> None:
        """Show the status after the delay: as a bar, or as lines until the call has ended."""
        if self.wait(DELAY_SECONDS):
            return
        if self.console.is_interactive:
            self.start_bar()
        else:
            self.print_lines()

    def start_bar(self) -> None:
        """Start the line of a terminal, which Rich then updates."""
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        one_line = Column(no_wrap=True, overflow="ellipsis")
        text = TextColumn("{task.description}", markup=False, table_column=one_line)
        bar = Progress(
            SpinnerColumn(), text, TimeElapsedColumn(), console=self.console, transient=True, refresh_per_second=5,
            # Rich would restore streams that traces had replaced for a while.
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        bar.add_task(self.text, total=None)
        bar.tasks[0].start_time = bar.get_time() - DELAY_SECONDS
        with self.lock:
            bar.start()
            self.bar = bar
        self.update(self.text)  # which may have changed

    def print_lines(self) -> None:
        """Print the text whenever it has changed and `LINE_SECONDS` have passed."""
        printed, seconds = "", DELAY_SECONDS
        while True:
            if (text := self.text) != printed:
                self.console.print(f"autopar: {text} ({seconds:.0f} s)", soft_wrap=True, markup=False)
                printed = text
            if self.wait(LINE_SECONDS):
                return
            seconds += LINE_SECONDS

    @contextmanager
    def warnings_above(self) -> Iterator[None]:
        """Within ``with``, warnings are printed above the line of a terminal."""
        show = warnings.showwarning

        def show_above(*args: Any, **named: Any) -> None:
            with self.lock:
                if self.bar is not None:
                    self.bar.stop()
                show(*args, **named)
                if self.bar is not None:
                    self.bar.start()

        if not self.console.is_interactive:
            yield
            return
        warnings.showwarning = show_above
        try:
            yield
        finally:
            warnings.showwarning = show


CURRENT: ContextVar[Status | None] = ContextVar("CURRENT", default=None)
