"""The processes that measure, from their start to their end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.errors import WorkerError
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.assignment import Assignment
from autopar.measure.machine.cases import Case
from autopar.measure.machine.points import MeasuredPoint
from autopar.measure.machine.resume import save_points
from autopar.measure.workers import end, free_port, last_line, start

POLL_SECONDS = 0.1
LIMIT_SECONDS = 300.0  # for one case, or for the start
WORKER = "autopar.measure.machine.worker"


def measure(
    setting: ProfileSetting,
    cases: Sequence[Case],
    file: Path,
    points: Sequence[MeasuredPoint],
    progress: Callable[[int, str], None],
) -> None:
    """Measure, with one process for each device, into a file of kept points.

    Args:
        points: that the file starts with.
        progress: told how many cases are done and the name of the present one, when that changes.

    Raises:
        WorkerError: a process failed or one case took too long. The points so far are in the file.
    """
    save_points(file, setting, points)
    if not cases:
        return
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as name:
        folder = Path(name)
        Assignment(setting.device_type, tuple(cases), file.resolve()).write(folder)
        port, threads = free_port(), setting.threads or None
        processes = []
        try:
            for rank in range(setting.devices):
                processes.append(start(WORKER, folder, rank, setting.devices, port, threads))
            names = {case.name: number for number, case in enumerate(cases)}
            present, deadline = "", time.monotonic() + LIMIT_SECONDS
            while any(p.poll() is None for p in processes):
                at = last_line(folder / "0.log")
                if at != present and at in names:
                    present, deadline = at, time.monotonic() + LIMIT_SECONDS
                    progress(names[at], at)
                failed = next((rank for rank, p in enumerate(processes) if p.returncode), None)
                if failed is not None:
                    break
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"Nothing was measured in {LIMIT_SECONDS:.0f} s; rank 0 was at: {present or 'its start'}. The "
                        f"points so far are in {file}. Run the same command again to go on, or leave the kind out with "
                        "--only."
                    )
                time.sleep(POLL_SECONDS)
            failed = next((rank for rank, p in enumerate(processes) if p.returncode), None)
            if failed is not None:
                lines = (folder / "0.log").read_text(errors="replace").splitlines()
                present = next((text for text in reversed(lines) if text in names), "")
                raise WorkerError(
                    f"Rank {failed} failed while measuring {present or 'nothing yet'}: "
                    f"{last_line(folder / f'{failed}.log')}. The points so far are in {file}; run the same command "
                    "again to go on."
                )
        finally:
            end(processes)
    progress(len(cases), "")
