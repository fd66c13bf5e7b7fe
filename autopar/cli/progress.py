"""The progress of a training run: one moving line in a terminal, a line per epoch elsewhere, and a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.ir.units import percent
from autopar.train import Epoch


class TrainingProgress:
    """Tells the user and the history file how the training goes. Use it as a context manager."""

    def __init__(self, epochs: int, steps_per_epoch: int, history: Path | None) -> None:
        """Nothing is shown where ``history`` is None: that is every rank of torchrun but the first."""
        self.epochs, self.history = epochs, history
        self.console = Console(quiet=history is None, highlight=False)
        self.accuracy = "–"
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(None), TimeRemainingColumn(compact=True),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task(f"epoch 0/{epochs}", total=epochs * steps_per_epoch)

    def __enter__(self) -> TrainingProgress:
        if self.history is not None:
            self.history.write_text("")
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def step(self, epoch: int, loss: float, lr: float, samples_per_second: float) -> None:
        """A training step is done."""
        self.bar.update(self.task, advance=1, description=self.line(epoch, loss, lr, samples_per_second))

    def epoch(self, epoch: Epoch) -> None:
        """An epoch is done and evaluated."""
        self.accuracy = percent(epoch.accuracy)
        line = self.line(epoch.epoch, epoch.loss, epoch.lr, epoch.samples_per_second)
        self.bar.update(self.task, description=line)
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True)
        if self.history is not None:
            with self.history.open("a") as file:
                file.write(json.dumps(asdict(epoch)) + "\n")

    def line(self, epoch: int, loss: float, lr: float, samples_per_second: float) -> str:
        """Where the training is, in one line."""
        width = len(str(self.epochs))
        return (
            f"epoch {epoch:>{width}}/{self.epochs}  loss {loss:6.4f}  accuracy {self.accuracy:>7}  lr {lr:.1e}  "
            f"{samples_per_second:,.0f} samples/s"
        )
