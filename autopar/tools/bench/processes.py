"""A contestant's processes: started, watched, ended."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.measure.workers import end, free_port, last_line, start
from autopar.tools.bench.assignment import BenchTask
from autopar.tools.bench.rank_result import RankFailure, RankResult

WORKER = "autopar.tools.bench.worker"
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0  # for the other ranks to say why they failed, once one has
USER_FACING_KINDS = ("expressible", "usage")  # kinds of failures whose text is written for users


@dataclass(frozen=True)
class BaselineOutcome:
    """What all ranks left, or why there is nothing to compare."""

    ranks: tuple[RankResult, ...] = ()
    failure: RankFailure | None = None


def run_baseline(task: BenchTask, world: int, threads: int | None, limit_seconds: float) -> BaselineOutcome:
    """Run to the end, to the first failure or to the time limit; no process is left.

    Args:
        threads: of each process, on CPU.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-bench-") as name:
        folder = Path(name)
        task.write(folder / "assignment.json")
        processes: list[subprocess.Popen] = []
        port = free_port()
        try:
            for rank in range(world):
                processes.append(start(WORKER, folder, rank, world, port, threads))
            slow = wait(processes, time.monotonic() + limit_seconds)
        finally:
            end(processes)
        return collected(folder, [p.returncode for p in processes], limit_seconds if slow else None)


def wait(processes: Sequence[subprocess.Popen], deadline: float) -> bool:
    """Wait until all have ended, or a while after one has failed; whether the deadline came first."""
    given_up: float | None = None
    while any(p.poll() is None for p in processes):
        now = time.monotonic()
        if given_up is None and any(p.returncode for p in processes):
            given_up = now + GRACE_SECONDS
        if given_up is not None and now > given_up:
            return False
        if given_up is None and now > deadline:
            return True
        time.sleep(POLL_SECONDS)
    return False


def collected(folder: Path, codes: Sequence[int | None], limit_seconds: float | None) -> BaselineOutcome:
    """What the ranks left, or the failure that came first."""
    files = [folder / f"{rank}.json" for rank in range(len(codes))]
    left = {rank: RankResult.read(file) for rank, file in enumerate(files) if file.exists()}
    failures = [(files[r].stat().st_mtime_ns, r, own.failure) for r, own in left.items() if own.failure is not None]
    if failures:
        # Ranks that only noticed that a peer is gone come later, except where a GPU's memory ran out.
        _, rank, failure = min(failures, key=lambda f: (f[2].kind != "memory", f[0]))
        return BaselineOutcome(failure=RankFailure(failure.kind, failure_text(failure, rank, len(codes))))
    if len(left) == len(codes):
        return BaselineOutcome(tuple(left[rank] for rank in range(len(codes))))
    rank = next(r for r in range(len(codes)) if r not in left)
    if limit_seconds is not None:
        where = last_line(folder / f"{rank}.log")
        return BaselineOutcome(
            failure=RankFailure("time", f"no result within {limit_seconds:.0f} s; rank {rank} was at: {where}")
        )
    died = next((r for r, code in enumerate(codes) if code and r not in left), rank)
    text = f"rank {died} ended with code {codes[died]} and said: {last_line(folder / f'{died}.log')}"
    return BaselineOutcome(failure=RankFailure("died", text))


def failure_text(failure: RankFailure, rank: int, world: int) -> str:
    """The text of a failure for a table."""
    if failure.kind in USER_FACING_KINDS:
        return failure.text
    where = f" (rank {rank})" if world > 1 else ""
    return (
        f"out of memory{where}: {failure.text}"
        if failure.kind == "memory"
        else f"{failure.kind}{where}: {failure.text}"
    )
