"""Measures cases with one worker process per device, and keeps each point in a file as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import SEE_DOCTOR, WorkerError
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.cases import Case
from autopar.measure.machine.points import MeasuredPoint, append_point, save_points
from autopar.measure.workers import WorkerLimits, run_workers

LIMIT_SECONDS = 300.0  # for one case, or for the start
WORKER = "autopar.measure.machine.worker:run"


@dataclass(frozen=True)
class ProfileTask:
    """Cases that all workers measure, in order."""

    device_type: str
    cases: tuple[Case, ...]


def measure(
    setting: ProfileSetting,
    cases: Sequence[Case],
    file: Path,
    points: Sequence[MeasuredPoint],
    progress: Callable[[int, str], None],
) -> None:
    """Measure cases and write their points to a file from which a later run resumes.

    Args:
        points: written to the file first.
        progress: called with the number of cases done and the name of the present one, whenever that changes.

    Raises:
        WorkerError: a process failed, or one case took too long. The points so far are in the file.
    """
    save_points(file, setting, points)
    if not cases:
        return
    numbers = {case.name: number for number, case in enumerate(cases)}
    present = ""

    def on_line(line: str) -> bool:
        nonlocal present
        if line not in numbers:
            return False
        present = line
        progress(numbers[line], line)
        return True

    def on_result(rank: int, point: MeasuredPoint) -> bool:
        append_point(file, point)
        return False

    exit = run_workers(
        WORKER, ProfileTask(setting.device_type, tuple(cases)), setting.devices, setting.threads or None,
        WorkerLimits(LIMIT_SECONDS), on_result, on_line, "profile",
    )  # fmt: skip
    if exit.failed_rank is not None:
        raise WorkerError(
            f"Rank {exit.failed_rank} failed while measuring {present or 'nothing yet'}: "
            f"{exit.last_lines[exit.failed_rank]}. The points so far are in {file}; run the same command again to go "
            f"on. {SEE_DOCTOR}"
        )
    if exit.timed_out:
        raise WorkerError(
            f"Nothing was measured in {LIMIT_SECONDS:.0f} s; rank 0 was at: {present or 'its start'}. The points so "
            f"far are in {file}. Run the same command again to go on, or leave the kind out with --only. {SEE_DOCTOR}"
        )
    progress(len(cases), "")
