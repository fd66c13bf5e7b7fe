"""What can be told how a training goes: the hooks, and those that come with the package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autopar.errors import UsageError
from autopar.runtime.checkpoint.folder import copy_checkpoint, is_checkpoint
from autopar.train.rank_zero import is_rank_zero, run_on_rank_zero
from autopar.train.run.folder import BEST, EPOCHS, LAST, STEPS, check_free, lies_in, make_folder
from autopar.train.run.reports import EpochReport, StepReport, TrainerView
from autopar.train.run.state import read_run
from autopar.train.timm_optional import needed


class Callback(Protocol):
    """Hooks of a training run; each does nothing unless it is overridden.

    They are called on every rank of torchrun, so that they may make the model's calls, which all ranks have to make.
    What only one of them should do, such as writing a file, asks `leads`.
    """

    def on_start(self, trainer: TrainerView) -> None:
        """Training starts, or goes on from a checkpoint."""

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        """The weights were updated; this is what it came to.

        On GPUs the trainer may be up to two updates further by then: ``report`` says which update it is of.
        """

    def on_update(self, trainer: TrainerView) -> None:
        """An update was launched, and the trainer's position is after it: what the model is asked for now includes it.

        What it came to is told by `on_step`: on CPU before this, on GPUs later. To wait for it there leaves GPUs idle.
        """

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        """An epoch is done and evaluated, and the trainer's position is the start of the next."""

    def on_checkpoint(self, trainer: TrainerView, folder: Path) -> None:
        """A checkpoint is complete."""

    def on_interrupt(self, trainer: TrainerView) -> None:
        """Ctrl-C ends the training here, between two updates at the trainer's position."""

    def on_end(self, trainer: TrainerView) -> None:
        """Training is over, because it is done or because an exception ended it."""


def take_folder(trainer: TrainerView, folder: Path) -> None:
    """Make a folder, or take one that is there, for a run's files.

    Raises:
        UsageError: it cannot be made, or holds a run that this one would replace, because it does not go on from there.
    """
    make_folder(folder)
    goes_on = trainer.resumed is not None and lies_in(trainer.resumed, folder)
    if not goes_on and folder.resolve() not in trainer.run_folders:
        check_free(
            folder,
            go_on='trainer.resume("{}")',
            instead=f'take another folder, or remove it first with autopar.train.remove_run(Path("{folder}")).',
        )
    trainer.run_folders.add(folder.resolve())


class JsonLog(Callback):
    """A line for each step in ``steps.jsonl`` and one for each epoch in ``history.jsonl``.

    Lines are written before the checkpoint that counts them. A run that goes on from a checkpoint drops the lines of
    what came after it, and goes on in the same files; in another folder it takes over the lines up to there. Any other
    run is refused in the folder of an earlier one (`autopar.train.remove_run`); logs without a line are none.
    """

    def __init__(self, folder: Path) -> None:
        self.steps, self.epochs = folder / STEPS, folder / EPOCHS

    def on_start(self, trainer: TrainerView) -> None:
        """Raise a UsageError if another run is in the folder."""
        run_on_rank_zero(partial(self.begin, trainer), trainer.pm.broadcast_from_rank0)

    def begin(self, trainer: TrainerView) -> None:
        """Keep the lines up to where the training starts."""
        take_folder(trainer, self.steps.parent)
        known = lines_until(self.steps, trainer.position.update)
        if not known and trainer.resumed is not None:
            known = lines_until(trainer.resumed.parent / STEPS, trainer.position.update)
        self.steps.write_text("".join(known))
        self.epochs.write_text("".join(json.dumps(asdict(report)) + "\n" for report in trainer.history))

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        del trainer
        append_line(self.steps, asdict(report))

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        del trainer
        append_line(self.epochs, asdict(report))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a file, on the leading rank."""
    if is_rank_zero():
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

    def on_start(self, trainer: TrainerView) -> None:
        if is_rank_zero():
            make = needed("torch.utils.tensorboard", "TensorBoard logging", "tensorboard").SummaryWriter
            self.writer = make(str(self.folder), purge_step=trainer.position.update + 1)

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        del trainer
        self.write("train", {"loss": report.loss, "lr": report.lr}.items(), report.update)

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        del trainer
        self.write("epoch", asdict(report).items(), report.update)

    def write(self, group: str, figures: Iterable[tuple[str, float | None]], update: int) -> None:
        """Write those figures that there are."""
        if self.writer is not None:
            for name, value in figures:
                if value is not None:
                    self.writer.add_scalar(f"{group}/{name}", value, update)

    def on_end(self, trainer: TrainerView) -> None:
        del trainer
        if self.writer is not None:
            self.writer.close()


class Checkpoints(Callback):
    """Checkpoints ``last`` and ``best`` in a folder, after each epoch; ``last`` also every so many updates, on Ctrl-C,
    and at the start of a run that goes on from one in another folder, of which it takes ``best`` over too.

    ``best`` is that of the highest accuracy (of the averaged weights, where there are any). A run that does not go on
    from one of them is refused in the folder of an earlier one (`autopar.train.remove_run`).
    """

    def __init__(self, folder: Path, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise UsageError(f"A checkpoint every {every} updates: it must be at least 1.")
        self.folder, self.every = folder, every

    def on_start(self, trainer: TrainerView) -> None:
        """Raise a UsageError if another run is in the folder."""
        run_on_rank_zero(partial(take_folder, trainer, self.folder), trainer.pm.broadcast_from_rank0)
        if trainer.resumed is not None and not lies_in(trainer.resumed, self.folder):
            trainer.save(self.folder / LAST)
            best = trainer.resumed.parent / BEST
            if is_rank_zero() and is_checkpoint(best) and read_run(best).best == trainer.best:  # no later one
                copy_checkpoint(best, self.folder / BEST)

    def on_update(self, trainer: TrainerView) -> None:
        position = trainer.position
        if self.every is not None and position.update % self.every == 0 and not position.epoch_done:
            trainer.save(self.folder / LAST)

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        if report.best:
            trainer.save(self.folder / BEST)
        trainer.save(self.folder / LAST)

    def on_interrupt(self, trainer: TrainerView) -> None:
        if trainer.saved != trainer.position:
            trainer.save(self.folder / LAST)
