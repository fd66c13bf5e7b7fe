"""Callbacks of a training run: the hooks, and the callbacks that write logs and checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autopar.api.checkpoint import check_keep
from autopar.errors import UsageError
from autopar.ir.files import replacing
from autopar.runtime.checkpoint.folder import copy_checkpoint, is_checkpoint, save_folder
from autopar.train.rank_zero import is_rank_zero, run_on_rank_zero
from autopar.train.run.folder import BEST, EPOCHS, LAST, STEPS, check_free, lies_in, make_folder
from autopar.train.run.reports import EpochReport, StepReport, TrainerView
from autopar.train.run.state import read_run


class Callback(Protocol):
    """Hooks of a training run; a hook does nothing unless it is overridden.

    Hooks run on every rank of torchrun, so they may call the model, which all ranks have to do together. Work for one
    rank, such as writing a file, is guarded by `is_rank_zero`.
    """

    def on_start(self, trainer: TrainerView) -> None:
        """Training starts or resumes."""

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        """The results of an update are known.

        On GPUs the trainer may have launched up to two further updates by then; ``report.update`` is the number of this
        one.
        """

    def on_update(self, trainer: TrainerView) -> None:
        """An update was launched; the trainer's position and the model's state are those after it.

        Its results come with `on_step`: before this hook on CPU, later on GPUs. Waiting for them here leaves GPUs idle.
        """

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        """An epoch is done and evaluated; the trainer's position is the start of the next epoch."""

    def on_checkpoint(self, trainer: TrainerView, folder: Path) -> None:
        """A checkpoint is complete."""

    def on_interrupt(self, trainer: TrainerView) -> None:
        """Ctrl-C or SIGTERM ends the training between two updates, at the trainer's position."""

    def on_end(self, trainer: TrainerView) -> None:
        """Training has ended, normally or by an exception."""


def take_folder(trainer: TrainerView, folder: Path) -> None:
    """Create a folder for a run's files, or use an existing one.

    Raises:
        UsageError: the folder cannot be created, or it holds another run than the one that this run resumes.
    """
    make_folder(folder)
    resumes = trainer.resumed is not None and lies_in(trainer.resumed, folder)
    if not resumes and folder.resolve() not in trainer.run_folders:
        check_free(
            folder,
            go_on='trainer.resume("{}")',
            instead=f'take another folder, or remove it first with autopar.train.remove_run(Path("{folder}")).',
        )
    trainer.run_folders.add(folder.resolve())


class JsonLog(Callback):
    """Writes a line for each step into ``steps.jsonl`` and one for each epoch into ``history.jsonl``.

    Lines are written before the checkpoint that includes their update. A run that resumes drops the lines after its
    checkpoint and appends to the same files; in another folder it copies the lines up to the checkpoint. A run that
    does not resume is refused in the folder of an earlier run (`autopar.train.remove_run`), unless its logs are empty.
    """

    def __init__(self, folder: Path) -> None:
        self.steps: Path = folder / STEPS
        self.epochs: Path = folder / EPOCHS

    def on_start(self, trainer: TrainerView) -> None:
        """Raise a UsageError if another run is in the folder."""
        run_on_rank_zero(partial(self.begin, trainer), trainer.pm.broadcast_from_rank0)

    def begin(self, trainer: TrainerView) -> None:
        """Write both files with the lines up to the position at which training starts."""
        take_folder(trainer, self.steps.parent)
        lines = lines_until(self.steps, trainer.position.update)
        if not lines and trainer.resumed is not None:
            lines = lines_until(save_folder(trainer.resumed).parent / STEPS, trainer.position.update)
        with replacing(self.steps) as file:
            file.write_text("".join(lines))
        with replacing(self.epochs) as file:
            file.write_text("".join(json.dumps(asdict(report)) + "\n" for report in trainer.history))

    def on_step(self, trainer: TrainerView, report: StepReport) -> None:
        del trainer
        append_line(self.steps, asdict(report))

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        del trainer
        append_line(self.epochs, asdict(report))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file, on rank 0."""
    if is_rank_zero():
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def lines_until(path: Path, update: int) -> list[str]:
    """Lines of a log up to an update; none if there is no log."""
    kept: list[str] = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n") or json.loads(line)["update"] > update:  # a killed run may have written half a line
            break
        kept.append(line)
    return kept


class Checkpoints(Callback):
    """Saves checkpoints ``last`` and ``best`` in a folder after each epoch.

    ``last`` is also saved every ``every`` updates, on Ctrl-C and on SIGTERM; ``keep`` of its checkpoints are kept, as
    `ParallelModel.save_checkpoint` says. A run that resumes from another folder saves ``last`` when it starts, and
    copies ``best`` from there. ``best`` has the highest accuracy, of the averaged weights if there are any. A run that
    does not resume is refused in the folder of an earlier run (`autopar.train.remove_run`).
    """

    def __init__(self, folder: Path, every: int | None = None, keep: int = 1) -> None:
        if every is not None and every < 1:
            raise UsageError(f"A checkpoint every {every} updates: it must be at least 1.")
        check_keep(keep)
        self.folder: Path = folder
        self.every: int | None = every
        self.keep: int = keep

    def on_start(self, trainer: TrainerView) -> None:
        """Raise a UsageError if another run is in the folder."""
        run_on_rank_zero(partial(take_folder, trainer, self.folder), trainer.pm.broadcast_from_rank0)
        if trainer.resumed is not None and not lies_in(trainer.resumed, self.folder):
            trainer.save(self.folder / LAST, self.keep)
            run_on_rank_zero(partial(self.copy_best, trainer, trainer.resumed), trainer.pm.broadcast_from_rank0)

    def copy_best(self, trainer: TrainerView, resumed: Path) -> None:
        """Copy ``best`` of the run that this one resumes, if it had been saved by then."""
        best = save_folder(resumed).parent / BEST
        if is_checkpoint(best) and read_run(best).best == trainer.best:
            copy_checkpoint(best, self.folder / BEST)

    def on_update(self, trainer: TrainerView) -> None:
        position = trainer.position
        if self.every is not None and position.update % self.every == 0 and not position.epoch_done:
            trainer.save(self.folder / LAST, self.keep)

    def on_epoch(self, trainer: TrainerView, report: EpochReport) -> None:
        if report.best:
            trainer.save(self.folder / BEST)
        trainer.save(self.folder / LAST, self.keep)

    def on_interrupt(self, trainer: TrainerView) -> None:
        if trainer.saved != trainer.position:
            trainer.save(self.folder / LAST, self.keep)
