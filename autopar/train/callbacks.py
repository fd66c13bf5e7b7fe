"""What can be told how a training goes: the hooks, and those that come with the package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autopar.errors import UsageError
from autopar.runtime import copy_checkpoint, is_checkpoint, launched
from autopar.train.optional import needed
from autopar.train.reports import EpochReport, StepReport
from autopar.train.saved_run import read_run

if TYPE_CHECKING:
    from autopar.train.trainer import Trainer

LAST, BEST = "last", "best"


def last_of(folder: Path) -> Path:
    """The checkpoint that a folder stands for: the last one of a run's folder, or the folder itself."""
    return folder / LAST if (folder / LAST).is_dir() else folder


class Callback(Protocol):
    """Hooks of a training run; each does nothing unless it is overridden.

    They are called on every rank of torchrun, so that they may make the model's calls, which all ranks have to make.
    What only one of them should do, such as writing a file, asks `leads`.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Training starts, or goes on from a checkpoint."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """The weights were updated; this is what it came to.

        On GPUs the trainer may be up to two updates further by then: ``report`` says which update it is of.
        """

    def on_update(self, trainer: Trainer) -> None:
        """An update was launched, and the trainer's position is after it: what the model is asked for now includes it.

        What it came to is told by `on_step`: on CPU before this, on GPUs later. To wait for it there leaves GPUs idle.
        """

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        """An epoch is done and evaluated, and the trainer's position is the start of the next."""

    def on_checkpoint(self, trainer: Trainer, folder: Path) -> None:
        """A checkpoint is complete."""

    def on_interrupt(self, trainer: Trainer) -> None:
        """Ctrl-C ends the training here, between two updates at the trainer's position."""

    def on_end(self, trainer: Trainer) -> None:
        """Training is over, because it is done or because an exception ended it."""


def leads() -> bool:
    """Whether this process prints and writes: the only one, or torchrun's first."""
    launch = launched()
    return launch is None or launch.rank == 0


def make_folder(folder: Path) -> None:
    """Create a folder for results.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot make the folder {folder}: {error.strerror}. Choose another --output.") from error


class JsonLog(Callback):
    """A line for each step in ``steps.jsonl`` and one for each epoch in ``history.jsonl``.

    Lines are written before the checkpoint that counts them. A run that goes on from a checkpoint drops the lines of
    what came after it, and goes on in the same files; in another folder it takes over the lines up to there.
    """

    def __init__(self, folder: Path) -> None:
        self.steps, self.epochs = folder / "steps.jsonl", folder / "history.jsonl"

    def on_start(self, trainer: Trainer) -> None:
        if leads():
            make_folder(self.steps.parent)
            beside = trainer.resumed.parent / self.steps.name if trainer.resumed is not None else self.steps
            known = lines_until(beside if beside.exists() else self.steps, trainer.position.update)
            self.steps.write_text("".join(known))
            self.epochs.write_text("".join(json.dumps(asdict(report)) + "\n" for report in trainer.history))

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        del trainer
        append_line(self.steps, asdict(report))

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        del trainer
        append_line(self.epochs, asdict(report))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a file, on the leading rank."""
    if leads():
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def lines_until(path: Path, update: int) -> list[str]:
    """The lines of a log up to this update; none where there is no log."""
    kept: list[str] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n") or json.loads(line)["update"] > update:  # a killed run may leave half a line
            break
        kept.append(line)
    return kept


class TensorBoard(Callback):
    """Scalars for TensorBoard: the loss and learning rate of each step, all figures of each epoch."""

    def __init__(self, folder: Path) -> None:
        """Raise a UsageError where tensorboard is not installed."""
        needed("tensorboard", "TensorBoard logging")
        self.folder = folder
        self.writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if leads():
            make = needed("torch.utils.tensorboard", "TensorBoard logging", "tensorboard").SummaryWriter
            self.writer = make(str(self.folder), purge_step=trainer.position.update + 1)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        del trainer
        self.write("train", {"loss": report.loss, "lr": report.lr}.items(), report.update)

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        del trainer
        self.write("epoch", asdict(report).items(), report.update)

    def write(self, group: str, figures: Iterable[tuple[str, float | None]], update: int) -> None:
        """Write those figures that there are."""
        if self.writer is not None:
            for name, value in figures:
                if value is not None:
                    self.writer.add_scalar(f"{group}/{name}", value, update)

    def on_end(self, trainer: Trainer) -> None:
        del trainer
        if self.writer is not None:
            self.writer.close()


class Checkpoints(Callback):
    """Checkpoints ``last`` and ``best`` in a folder, after each epoch; ``last`` also every so many updates, on Ctrl-C,
    and at the start of a run that goes on from one in another folder, of which it takes ``best`` over too.

    ``best`` is that of the highest accuracy (of the averaged weights, where there are any).
    """

    def __init__(self, folder: Path, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise UsageError(f"A checkpoint every {every} updates: it must be at least 1.")
        self.folder, self.every = folder, every

    def on_start(self, trainer: Trainer) -> None:
        if leads():
            make_folder(self.folder)
        earlier = trainer.resumed.parent if trainer.resumed is not None else self.folder
        if earlier.resolve() != self.folder.resolve():
            trainer.save(self.folder / LAST)
            best = earlier / BEST
            if leads() and is_checkpoint(best) and read_run(best).best == trainer.best:  # no later one
                copy_checkpoint(best, self.folder / BEST)

    def on_update(self, trainer: Trainer) -> None:
        position = trainer.position
        if self.every is not None and position.update % self.every == 0 and not position.epoch_done:
            trainer.save(self.folder / LAST)

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        if report.best:
            trainer.save(self.folder / BEST)
        trainer.save(self.folder / LAST)

    def on_interrupt(self, trainer: Trainer) -> None:
        if trainer.saved != trainer.position:
            trainer.save(self.folder / LAST)
