"""Progress display of a training run: one live line in a terminal or notebook, otherwise a line per epoch."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from autopar.ir.notebook import NotebookBar
from autopar.ir.terminal import progress_console
from autopar.ir.units import BYTES, percent, text
from autopar.train.callbacks import Callback
from autopar.train.rank_zero import is_rank_zero
from autopar.train.run.reports import EpochReport, StepReport, TrainerView


class ProgressBar(Callback):
    """Shows loss, accuracy, learning rate, samples per second, share of waits for data, and memory, on rank 0.

    Memory is the GPU allocator's peak. On CPU it is the growth of the process, which includes libraries and images that
    were loaded later.
    """

    def __init__(self) -> None:
        self.console: Console = progress_console(stderr=False, quiet=not is_rank_zero())
        self.bar: Progress = Progress(
            TextColumn("{task.description}"), BarColumn(None), TimeRemainingColumn(compact=True),
            console=self.console, disable=not self.console.is_interactive or not is_rank_zero(),
        )  # fmt: skip
        self.notebook: NotebookBar = NotebookBar(self.bar)
        self.is_live: bool = self.console.is_interactive or self.notebook.is_shown
        self.task: TaskID = self.bar.add_task("")
        self.accuracy: str = f"{'–':>7}"
        self.memory_prefix: str = ""

    def on_start(self, trainer: TrainerView) -> None:
        done = trainer.position
        self.memory_prefix = "process +" if trainer.pm.machine.device_type == "cpu" else ""
        if trainer.history:
            self.accuracy = accuracy_text(trainer.history[-1])
        text = f"epoch {done.epoch}/{trainer.epochs}"
        if trainer.pm.compiled:
            text += "  the first step compiles the model"
            if not self.is_live:
                self.console.print(text)
        self.bar.update(self.task, total=trainer.epochs * done.steps, completed=done.update, description=text)
        self.bar.start()
        self.notebook.refresh(now=True)

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        self.bar.update(self.task, completed=report.update, description=self.line(trainer.epochs, report))
        self.notebook.refresh()

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        self.accuracy = accuracy_text(report)
        line = self.line(trainer.epochs, report)
        self.bar.update(self.task, description=line)
        self.notebook.refresh(now=True)
        if not self.is_live:
            self.console.print(line, soft_wrap=True)

    def on_end(self, trainer: TrainerView) -> None:
        del trainer
        self.bar.stop()

    def line(self, epochs: int, report: StepReport | EpochReport) -> str:
        """Position and metrics in one line."""
        return (
            f"epoch {report.epoch:>{len(str(epochs))}}/{epochs}  loss {report.loss:6.4f}  accuracy {self.accuracy}  "
            f"lr {report.lr:.1e}  {report.samples_per_second:,.0f} samples/s  data {percent(report.data_share, 0)}  "
            f"{self.memory_prefix}{text(report.peak_bytes, BYTES)}"
        )


def accuracy_text(report: EpochReport) -> str:
    """Accuracies of an epoch: of the weights, and of their averages if there are any; a dash for none."""
    if report.accuracy is None:
        return f"{'–':>7}"
    averaged = f" (EMA {percent(report.ema_accuracy)})" if report.ema_accuracy is not None else ""
    return f"{percent(report.accuracy):>7}{averaged}"
