"""Runs a baseline's worker processes: the results of all ranks, or the failure that explains their absence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.measure.workers import WorkerLimits, WorkersExit, run_workers
from autopar.runtime.engine.records import ActionTiming
from autopar.runtime.spec import RankStats
from autopar.tools.bench.kernel_trace import ProfiledStep
from autopar.tools.bench.task import BenchTask


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed.

    Args:
        kind: "expressible" if the baseline cannot run this at all, "usage" if a setting is wrong, "memory" if a GPU
            ran out of memory, "time" if the limit passed, "died" if the process ended without a word, else the
            exception's class.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class StepSpans:
    """The actions of all ranks in one step, and the host clock at each rank's first action."""

    spans: Mapping[int, tuple[ActionTiming, ...]]
    started_ns: Mapping[int, int]

    @staticmethod
    def of(stats: Mapping[int, RankStats]) -> StepSpans:
        return StepSpans({r: s.spans for r, s in stats.items()}, {r: s.started_ns for r, s in stats.items()})


@dataclass(frozen=True)
class RankResult:
    """One rank's measurements.

    Args:
        seconds: of each timed step.
        losses: this rank's share of the loss of each step in order, warm-up included.
        peak_bytes: peak memory over all steps: of the allocator on a GPU, growth of the process on CPU.
        first_step_seconds: from the start of building to the end of the first warm-up step, compilation included; 0
            without warm-up.
        step_ns: host clock before and after each inspected step, with an idle device. On CPU these are the timed steps.
        steps: spans of each inspected step, from rank 0 of baselines that run a plan.
        tensor_bytes: peak bytes in tensors by rank, for baselines that count them.
        profiled: kernels of each profiled step.
        failure: why there are no measurements.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int
    first_step_seconds: float = 0.0
    step_ns: tuple[tuple[int, int], ...] = ()
    steps: tuple[StepSpans, ...] = ()
    tensor_bytes: Mapping[int, int] = field(default_factory=dict)
    profiled: tuple[ProfiledStep, ...] = ()
    failure: RankFailure | None = None


def failed_result(kind: str, text: str) -> RankResult:
    """The result of a rank that failed."""
    return RankResult((), (), 0, failure=RankFailure(kind, text))


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
