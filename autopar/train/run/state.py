"""State of a training run in a checkpoint, and the check that another run may resume from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autopar.api.checkpoint import read_header
from autopar.errors import CheckpointError, UsageError
from autopar.ir.units import plural
from autopar.runtime.checkpoint.folder import check_sizes, is_checkpoint, kept
from autopar.train.rank_zero import run_on_rank_zero
from autopar.train.run.folder import BEST, LAST, check_no_weights
from autopar.train.run.reports import EpochReport, EpochSums, RunPosition


@dataclass(frozen=True)
class SavedRun:
    """State that a trainer saves with the model.

    ``running`` are the sums of the epoch at ``position``; ``settings`` must equal those of a run that resumes.
    ``run_ids`` are the run's IDs in trackers, by the tracker's name; checkpoints of earlier versions have none.
    """

    position: RunPosition
    running: EpochSums
    history: tuple[EpochReport, ...]
    best: float | None
    settings: Mapping[str, Any]
    run_ids: Mapping[str, str] = field(default_factory=dict)

    def to_extra(self) -> dict[str, Any]:
        """The state as plain data, for `ParallelModel.save_checkpoint`."""
        return asdict(self)

    def check(self, settings: Mapping[str, Any], steps: int, folder: str | PathLike[str]) -> None:
        """Compare with a run that resumes.

        Args:
            steps: updates of its epochs.
            folder: the checkpoint, for messages.

        Raises:
            UsageError: a setting differs; lists the changes.
        """
        before = self.settings
        names = [*before, *(name for name in settings if name not in before)]
        changes = [f"{n} from {before.get(n)} to {settings.get(n)}" for n in names if before.get(n) != settings.get(n)]
        if changes:
            raise UsageError(
                f"Checkpoint {folder} cannot be resumed so: this would change {', '.join(changes)}. That would be "
                "another run. Give the values of the one that wrote it, or start from the beginning."
            )
        if self.position.steps != steps:
            raise UsageError(
                f"Checkpoint {folder} is of epochs of {plural(self.position.steps, 'update')}, now they have "
                f"{steps}. Use the batch size and the data of the run that wrote it."
            )


def read_run(folder: str | PathLike[str]) -> SavedRun:
    """State of the run that wrote a checkpoint.

    Raises:
        CheckpointError: the folder has no whole checkpoint.
        UsageError: no trainer wrote it.
    """
    header = read_header(folder)
    check_sizes(Path(folder), header)
    try:
        return TypeAdapter(SavedRun).validate_python(header.extra)
    except ValidationError as error:
        raise UsageError(
            f"Checkpoint {folder} does not say how far a training was, because no Trainer wrote it. "
            "Load it with pm.load_checkpoint and start at epoch 1."
        ) from error


def latest(folder: Path, instead: str) -> Path | None:
    """Checkpoint from which a restarted run goes on; None if it starts from the beginning.

    That is ``last``, or ``best`` if the run ended between its first ``best`` and its first ``last``.

    Args:
        folder: the run's.
        instead: what else can be done, for messages.

    Raises:
        CheckpointError: the checkpoint is damaged; names others that are whole. None of them is chosen.
        UsageError: no trainer wrote it, or the folder has weights without a checkpoint.
    """
    last, best = folder / LAST, folder / BEST
    if last.is_dir() and not is_checkpoint(last) and (whole := kept(last)):
        raise CheckpointError(
            f"{last} has lost its checkpoint.json, but {', '.join(map(str, whole))} has one. Resume from that, or "
            f"{instead}"
        )
    if not is_checkpoint(last) and not is_checkpoint(best):
        check_no_weights(folder, instead)
        return None
    if not is_checkpoint(last):
        read_run(best)
        return best
    try:
        read_run(last)
    except CheckpointError as error:
        with suppress(UsageError):  # damaged too
            updates = plural(read_run(best).position.update, "update")
            error = CheckpointError(f"{error} {best} is whole, after {updates}: resume from that, or {instead}")
        raise error from None
    return last


def latest_by_rank_zero(folder: Path, instead: str, broadcast: Callable[[str], str]) -> Path | None:
    """As `latest`, decided by rank 0 for all ranks; ``broadcast`` as in `run_on_rank_zero`."""

    def name() -> str | None:
        checkpoint = latest(folder, instead)
        return None if checkpoint is None else str(checkpoint)

    found = run_on_rank_zero(name, broadcast)
    return None if found is None else Path(found)
