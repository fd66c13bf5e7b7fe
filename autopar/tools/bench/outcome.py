"""Runs a baseline's worker processes: the results of all ranks, or the failure that explains their absence."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.measure.workers import WorkerLimits, WorkersExit, run_workers
from autopar.tools.bench.rank_result import RankFailure, RankResult
from autopar.tools.bench.task import BenchTask

WORKER = "autopar.tools.bench.worker:run"
GRACE_SECONDS = 10.0  # for the other ranks to report why they failed, once one has
USER_FACING_KINDS = ("expressible", "usage")  # kinds of failures whose text is written for users


@dataclass(frozen=True)
class BaselineOutcome:
    """The results of all ranks, or why there are none."""

    ranks: tuple[RankResult, ...] = ()
    failure: RankFailure | None = None


def run_baseline(task: BenchTask, world: int, threads: int | None, limit_seconds: float) -> BaselineOutcome:
    """Run to the end, to the first failure or to the time limit; no process is left.

    Args:
        threads: of each process, on CPU.
    """
    results: dict[int, RankResult] = {}
    failures: list[tuple[int, RankFailure]] = []  # in the order in which they happened

    def on_result(rank: int, result: RankResult) -> bool:
        results[rank] = result
        if result.failure is not None:
            failures.append((rank, result.failure))
        return False

    limits = WorkerLimits(limit_seconds, GRACE_SECONDS)
    exit = run_workers(WORKER, task, world, threads, limits, on_result, name="bench")
    if failures:
        # Ranks that only noticed that a peer is gone report later, except after a GPU ran out of memory.
        rank, failure = next((f for f in failures if f[1].kind == "memory"), failures[0])
        return BaselineOutcome(failure=RankFailure(failure.kind, failure_text(failure, rank, world)))
    if len(results) < world:
        missing = [rank for rank in range(world) if rank not in results]
        return BaselineOutcome(failure=silent_failure(exit, missing, limit_seconds))
    return BaselineOutcome(tuple(results[rank] for rank in range(world)))


def silent_failure(exit: WorkersExit, missing: list[int], limit_seconds: float) -> RankFailure:
    """The failure of a run in which ranks left no result.

    Args:
        missing: those ranks.
    """
    if exit.timed_out:
        rank = missing[0]
        text = f"no result within {limit_seconds:.0f} s; rank {rank} was at: {exit.last_lines[rank]}"
        return RankFailure("time", text)
    rank = next((r for r in missing if exit.codes[r]), missing[0])
    return RankFailure("died", f"rank {rank} ended with code {exit.codes[rank]} and said: {exit.last_lines[rank]}")


def failure_text(failure: RankFailure, rank: int, world: int) -> str:
    """The text of a rank's failure for a table."""
    if failure.kind in USER_FACING_KINDS:
        return failure.text
    where = f" (rank {rank})" if world > 1 else ""
    kind = "out of memory" if failure.kind == "memory" else failure.kind
    return f"{kind}{where}: {failure.text}"
