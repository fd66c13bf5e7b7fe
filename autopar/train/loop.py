"""The training loop: updates, an evaluation after each epoch, reports to callbacks, checkpoints."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from autopar.api.model import ParallelModel
from autopar.api.step_result import StepResult
from autopar.errors import NonFiniteLossWarning, TrainingError, UnreadableDataError, UsageError
from autopar.ir.units import of_type, plural
from autopar.train.callbacks import Callback
from autopar.train.data.iterable_loader import IterableLoader, check_equal_parts
from autopar.train.data.loader import Batch, IgnoreSignals, Loader, PartLoader, TimedBatches
from autopar.train.evaluation import Evaluation, evaluate, plain_scores
from autopar.train.rank_zero import run_on_rank_zero
from autopar.train.run.folder import start_again
from autopar.train.run.interrupt import Interrupt, TrainingInterrupted, TrainingTerminated, deferred_interrupts
from autopar.train.run.reports import EpochReport, EpochSums, RunPosition, StepReport
from autopar.train.run.state import SavedRun, latest_by_rank_zero, read_run

SchedulerSteps = Literal["none", "update", "epoch", "timm"]


@dataclass(frozen=True)
class LaunchedUpdate:
    """An update that was launched and whose results are not read yet.

    ``shares`` has each batch's part of it, ``data_seconds`` is the time in which this process waited for its batches.
    """

    position: RunPosition
    results: tuple[StepResult, ...]
    shares: tuple[float, ...]
    samples: int
    lr: float
    data_seconds: float

    @property
    def loss(self) -> float:
        """Mean loss over the samples; waits for the results."""
        return sum(result.loss * share for result, share in zip(self.results, self.shares, strict=True))

    @property
    def ready(self) -> bool:
        """Whether reading the results returns without waiting; true after the same later update on every rank."""
        return all(result.ready for result in self.results)


class Trainer:
    """Trains a parallel model for some epochs and reports to callbacks.

    The updates are a few lines around ``pm.train_step``, which a loop of your own can do as well. On GPUs an update is
    launched before the numbers of the previous one are known. Callbacks therefore get the report of an update up to two
    updates later, but always before an evaluation, a checkpoint or the end.

    Callbacks may read what `autopar.train.TrainerView` lists, such as ``position``, ``history`` (a report for each
    epoch) and ``best`` (the highest score so far).
    """

    def __init__(
        self,
        pm: ParallelModel,
        train_loader: Loader | Iterable[Any],
        eval_loader: Loader | Iterable[Any] | None = None,
        *,
        epochs: int,
        grad_accum_steps: int = 1,
        schedule: SchedulerSteps = "none",
        ema: bool = False,
        callbacks: Sequence[Callback] = (),
        scores: Callable[[Any], torch.Tensor] = plain_scores,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            train_loader: from `autopar.train.training_loader`, or an iterable of pairs (x, y) with a length, such as a
                DataLoader. Each of its batches is one call of the model.
            grad_accum_steps: batches of an update, which weighs all samples equally. Those of an iterable are read
                before the update, because they may differ in size.
            schedule: when the learning-rate scheduler steps: never, after each update, after each epoch, or after both
                as timm's schedulers do.
            ema: evaluate the averaged weights as well; `parallelize` must have been given ``ema=``.
            scores: returns [batch, classes] from the model's output.
            settings: plain values by name that must equal those of a checkpoint from which the run resumes.

        Raises:
            UsageError: a number is out of range, a loader has no length, or the data-parallel replicas cannot share a
                DataLoader's batches evenly.
            TraceError: there is an evaluation loader, but the model's eval mode could not be traced.
        """
        if epochs < 1 or grad_accum_steps < 1:
            raise UsageError(f"epochs={epochs} and grad_accum_steps={grad_accum_steps} must be at least 1.")
        self.pm: ParallelModel = pm
        self.epochs: int = epochs
        self.grad_accum_steps: int = grad_accum_steps
        self.train_loader: Loader = as_loader(train_loader)
        self.eval_loader: Loader | None = as_loader(eval_loader) if eval_loader is not None else None
        self.schedule: SchedulerSteps = schedule
        self.ema: bool = ema
        self.scores: Callable[[Any], torch.Tensor] = scores
        self.callbacks: tuple[Callback, ...] = tuple(callbacks)
        self.settings: Mapping[str, Any] = json.loads(json.dumps(dict(settings or {})))  # normalized as in a checkpoint
        steps = len(self.train_loader) // grad_accum_steps
        if steps == 0:
            raise UsageError(
                f"An epoch has {plural(len(self.train_loader), 'batch', 'es')}, an update takes "
                f"grad_accum_steps={grad_accum_steps}. Use a smaller batch or fewer accumulation steps."
            )
        if isinstance(train_loader, DataLoader):
            check_equal_parts(train_loader, steps * grad_accum_steps, pm.plan.mesh.dp // pm.data_size)
        if eval_loader is not None:
            pm.check_evaluates()
        self.position: RunPosition = RunPosition(1, 0, steps)
        self.running: EpochSums = EpochSums()
        self.history: list[EpochReport] = []
        self.best: float | None = None
        self.peak_bytes: int = 0
        self.checkpoint: Path | None = None  # the last checkpoint written or read
        self.saved: RunPosition | None = None  # position of that checkpoint
        self.resumed: Path | None = None  # the checkpoint that the run resumes
        self.run_folders: set[Path] = set()  # folders that callbacks use for this run; a later fit() may use them again
        self.run_ids: dict[str, str] = {}  # of this run in trackers, by the tracker's name
        self.error: BaseException | None = None  # ends the training
        self.interrupt: Interrupt = Interrupt()
        self.launched: deque[LaunchedUpdate] = deque()  # updates that are not reported to callbacks yet
        self.elapsed: Callable[[], float] = lambda: 0.0  # seconds since the start of the epoch

    # -- training ----------------------------------------------------------------------------------------------

    def fit(self) -> list[EpochReport]:
        """Train from the current position to the last epoch and return the report of each epoch.

        The first Ctrl-C or SIGTERM takes effect between two updates, or two batches of an evaluation: `on_interrupt`
        hooks run, `Checkpoints` saves, and KeyboardInterrupt or SystemExit(143) is raised. The second one raises it
        immediately. A handler of the caller's for one of the signals stays in place.

        An image that cannot be read ends it in the same way, except under torchrun, where only its rank knows.

        Raises:
            TrainingError: a loss is not finite; names epoch and step. Checkpoints are unchanged.
            UnreadableDataError: an image cannot be read.
        """
        with ExitStack() as ends:
            self.interrupt = ends.enter_context(deferred_interrupts())
            for callback in self.callbacks:
                ends.push(partial(self.end, callback))
                callback.on_start(self)
            try:
                while self.position.epoch <= self.epochs:
                    self.train_epoch()
                    self.finish_epoch()
            except TrainingInterrupted:
                self.end_early()
                if self.interrupt.terminated:
                    raise TrainingTerminated from None
                raise
            except UnreadableDataError as error:
                if self.pm.machine.launched is not None:
                    raise
                self.pm.zero_grad()  # of the update's batches before
                self.end_early()
                if self.saved != self.position:
                    raise
                message = f"{error} The training until then is saved in {self.checkpoint}."
                raise UnreadableDataError(message) from error
        return self.history

    def end(
        self, callback: Callback, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Run a callback's `on_end`, when `fit` is left with this error or with None."""
        del kind, trace
        self.error = error
        callback.on_end(self)

    def end_early(self) -> None:
        """Report updates and run `on_interrupt` hooks between two updates, or in an evaluation."""
        self.report_steps(all_of_them=True)
        for callback in self.callbacks:
            callback.on_interrupt(self)

    def stop_if_interrupted(self, wait: bool = False) -> None:
        """Raise TrainingInterrupted on all ranks if any got a signal; one batch late, or immediately with ``wait``."""
        asked = self.pm.any_rank if wait else self.pm.any_rank_so_far
        if asked(self.interrupt.requested):
            raise TrainingInterrupted

    def train_epoch(self) -> None:
        """Do the remaining updates of the current epoch."""
        self.pm.train()
        batches = TimedBatches(self.train_loader.epoch(self.position.epoch, self.position.step * self.grad_accum_steps))
        before = max(self.running.elapsed, self.running.seconds)  # of the part of the epoch before a resume
        self.elapsed = lambda: before + batches.elapsed()
        while not self.position.epoch_done:
            self.update(batches)
            self.report_steps()
            for callback in self.callbacks:
                callback.on_update(self)
            self.stop_if_interrupted()

    def update(self, batches: TimedBatches) -> None:
        """Launch one update, of ``grad_accum_steps`` batches."""
        results, shares, samples = [], [], 0
        lr = max(self.pm.learning_rates(), default=0.0)
        for i, (batch, share) in enumerate(self.with_shares(batches), 1):
            step = self.pm.train_step if i == self.grad_accum_steps else self.pm.forward_backward
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NonFiniteLossWarning)  # `report` says more
                results.append(step(batch.x, batch.y, share=share))
            shares.append(share)
            samples += batch.count * self.pm.data_size
        self.position = self.position.next
        self.launched.append(
            LaunchedUpdate(self.position, tuple(results), tuple(shares), samples, lr, batches.take_waited())
        )
        if self.schedule == "timm":
            self.pm.lr_scheduler.step_update(self.position.update)
        elif self.schedule == "update":
            self.pm.lr_scheduler.step()

    def with_shares(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
        """The batches of one update, each with its share of the samples.

        Raises:
            UsageError: the loader ended before.
        """
        k = self.grad_accum_steps
        parts = islice(batches, k)
        if isinstance(self.train_loader, PartLoader):  # batches of one size, which are read when they are needed
            yield from ((part, 1 / k) for part in parts)
            return
        read = list(parts)
        if len(read) < k:
            raise UsageError(
                f"The loader ended after {self.position.step * k + len(read)} batches of epoch {self.position.epoch}; "
                f"its len() is {len(self.train_loader)}. Make them agree."
            )
        samples = sum(part.count for part in read)
        yield from ((part, part.count / samples) for part in read)

    def report_steps(self, all_of_them: bool = False) -> None:
        """Report updates whose results are known to callbacks; with ``all_of_them``, wait for all.

        Raises:
            TrainingError: a loss is not finite.
        """
        while self.launched and (all_of_them or self.launched[0].ready):
            report = self.report(self.launched.popleft())
            for callback in self.callbacks:
                callback.on_step(self, report)

    def report(self, update: LaunchedUpdate) -> StepReport:
        """Report of an update; waits for its results."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteLossWarning)  # the TrainingError below says more
            loss = update.loss
        last, position = update.results[-1], update.position
        if not isfinite(loss) and not last.skipped:
            raise self.not_finite(loss, update)
        seconds = sum(result.step_seconds for result in update.results)
        self.running = self.running.plus(
            None if last.skipped else loss, seconds, update.samples, update.lr, update.data_seconds, self.elapsed()
        )
        if self.peak_bytes == 0:
            self.measure_memory()
        return StepReport(
            position.epoch, position.step, position.update, loss, update.lr, last.grad_norm,
            self.running.samples_per_second, self.peak_bytes, last.skipped, self.running.data_share,
        )  # fmt: skip

    def not_finite(self, loss: float, update: LaunchedUpdate) -> TrainingError:
        position = update.position
        saved = f"The last checkpoint is {self.checkpoint}. " if self.checkpoint is not None else ""
        return TrainingError(
            f"The loss became {loss} in epoch {position.epoch}, step {position.step} of "
            f"{position.steps}, at a learning rate of {update.lr:.3g}. The weights are of no use any more. {saved}"
            "Use a lower learning rate, clip gradients, or look at the data of this step."
        )

    def finish_epoch(self) -> None:
        """Evaluate, report, and move on to the next epoch."""
        self.report_steps(all_of_them=True)
        done, running = self.position, self.running
        plain, averaged = self.evaluations()
        self.measure_memory()
        score = averaged or plain
        best = score is not None and (self.best is None or score.accuracy > self.best)
        report = EpochReport(
            done.epoch,
            done.update,
            running.mean_loss,
            running.lr,
            running.samples_per_second,
            self.peak_bytes,
            plain.accuracy if plain else None,
            plain.top5 if plain else None,
            plain.loss if plain else None,
            averaged.accuracy if averaged else None,
            best,
            running.data_share,
        )
        if self.schedule == "timm":
            self.pm.lr_scheduler.step(done.epoch, report.score)
        elif self.schedule == "epoch":
            self.pm.lr_scheduler.step()
        self.history.append(report)
        self.best = report.score if best else self.best
        self.position, self.running = done.next_epoch, EpochSums()
        for callback in self.callbacks:
            callback.on_epoch(self, report)
        self.stop_if_interrupted(wait=True)

    def evaluations(self) -> tuple[Evaluation | None, Evaluation | None]:
        """Evaluations of the weights and of their averages; None without averages or an evaluation loader."""
        if self.eval_loader is None:
            return None, None
        plain = evaluate(self.pm, self.test_batches(self.eval_loader), self.scores)
        if not self.ema:
            return plain, None
        with self.pm.ema_weights():
            return plain, evaluate(self.pm, self.test_batches(self.eval_loader), self.scores)

    def test_batches(self, loader: Loader) -> Iterator[Batch]:
        """All test batches; after an interrupt a resumed run starts this evaluation again."""
        for batch in loader.epoch(1):
            yield batch
            try:
                self.stop_if_interrupted()
            except TrainingInterrupted:
                self.pm.zero_grad()  # random operations repeat the numbers that they drew for this evaluation
                raise

    def measure_memory(self) -> None:
        self.peak_bytes = max(stats.peak_bytes for stats in self.pm.stats().values())

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: str | PathLike[str], keep: int = 1) -> None:
        """Write a checkpoint of the model and of the run's position; all ranks of torchrun call it.

        All updates in it are reported to callbacks first. ``keep`` is that of `ParallelModel.save_checkpoint`.

        Raises:
            TrainingError: the loss of one of them is not finite; nothing was written.
        """
        self.report_steps(all_of_them=True)
        run = SavedRun(self.position, self.running, tuple(self.history), self.best, self.settings, self.run_ids)
        self.pm.save_checkpoint(folder, run.to_extra(), keep)
        self.checkpoint, self.saved = Path(folder), self.position
        for callback in self.callbacks:
            callback.on_checkpoint(self, self.checkpoint)

    def resume_or_start(self, folder: str | PathLike[str]) -> Path | None:
        """Resume from the last checkpoint in a run's folder, or start if it has none: for scripts that are restarted.

        Logs of a run that ended before its first checkpoint are removed, with a `ResumeWarning`. After a run that is
        finished, `fit` returns immediately. Under torchrun rank 0 decides for all ranks.

        Returns:
            The checkpoint; None if training starts.

        Raises:
            CheckpointError: the last checkpoint is damaged; names others that are whole, and chooses none.
            UsageError: as `resume`, or the folder has weights without a checkpoint.
        """
        instead = f'remove the run first with autopar.train.remove_run(Path("{folder}")).'
        broadcast = self.pm.broadcast_from_rank0
        checkpoint = latest_by_rank_zero(Path(folder), instead, broadcast)
        if checkpoint is not None:
            self.resume(checkpoint)
            return checkpoint
        run_on_rank_zero(partial(start_again, Path(folder)), broadcast)
        return None

    def resume(self, folder: str | PathLike[str]) -> None:
        """Resume from a checkpoint, on any mesh.

        Raises:
            UsageError: no trainer wrote it, or one with other settings, which are named. Nothing was loaded.
            CheckpointError: as `ParallelModel.load_checkpoint`.
        """
        run = read_run(folder)
        run.check(self.settings, self.position.steps, folder)
        self.pm.load_checkpoint(folder)
        self.position, self.running, self.best = run.position, run.running, run.best
        self.history, self.run_ids = list(run.history), dict(run.run_ids)
        self.checkpoint = self.resumed = Path(folder)
        self.saved = self.position


def as_loader(loader: Loader | Iterable[Any]) -> Loader:
    """An iterable of batches as a `Loader`; processes of a DataLoader ignore signals. A `Loader` as it is.

    Raises:
        UsageError: the iterable has no length.
    """
    if isinstance(loader, Loader):
        return loader
    if isinstance(loader, DataLoader):
        own = copy(loader)  # the caller's stays as it is
        own.worker_init_fn = IgnoreSignals(loader.worker_init_fn)
        loader = own
    try:
        return IterableLoader(loader, len(loader))  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(
            f"The length of the loader, {of_type(loader)}, is not known, and an epoch is a number of batches: {error}. "
            "Give it, or its data set, a __len__()."
        ) from error
