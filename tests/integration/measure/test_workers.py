"""`run_workers`: results in order, failures of any rank noticed, limits that progress extends."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from autopar.measure.workers import Emit, WorkerLimits, WorkersExit, run_workers


@dataclass(frozen=True)
class Task:
    """Rank r sleeps ``seconds[r]`` before each of ``count`` results, then fails if it is ``failing``."""

    seconds: tuple[float, ...]
    count: int
    failing: int | None = None


def entry(task: Task, emit: Emit) -> None:
    rank = int(os.environ["RANK"])
    for number in range(task.count):
        time.sleep(task.seconds[rank])
        print(f"result {number}", flush=True)
        emit((rank, number))
    if rank == task.failing:
        raise ValueError("no more\nof this")


def listens(_: Task, emit: Emit) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    family = {os.getpid(), os.getppid()}
    listeners = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in family]
    emit({str(next(iter(c.laddr))) for c in listeners})
    dist.barrier()


@pytest.mark.full
def test_ranks_meet_on_the_loopback_interface_alone() -> None:
    results: list[set[str]] = []
    exit = run_workers(
        "test_workers:listens", Task((), 0), 2, 1, WorkerLimits(60.0), lambda _, own: bool(results.append(own))
    )
    assert exit.codes == (0, 0) and results == [{"127.0.0.1"}] * 2, exit.last_lines


def run(task: Task, limits: WorkerLimits) -> tuple[WorkersExit, list[tuple[int, int]], list[str]]:
    results: list[tuple[int, int]] = []
    lines: list[str] = []

    def on_result(rank: int, result: tuple[int, int]) -> bool:
        assert rank == result[0]
        results.append(result)
        return True

    exit = run_workers(
        "test_workers:entry", task, len(task.seconds), 1, limits, on_result, lambda line: bool(lines.append(line))
    )
    return exit, results, lines


def test_all_results_arrive_in_each_ranks_order() -> None:
    exit, results, lines = run(Task((0.0, 0.2), 3), WorkerLimits(60.0))
    assert (exit.codes, exit.timed_out, exit.failed_rank) == ((0, 0), False, None)
    assert [r for r in results if r[0] == 1] == [(1, 0), (1, 1), (1, 2)] and len(results) == 6
    assert lines == ["result 0", "result 1", "result 2"]


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickle.py").write_text("raise SystemExit('foreign code ran')")
    exit, results, _ = run(Task((0.0,), 1), WorkerLimits(60.0))
    assert exit.codes == (0,) and results == [(0, 0)], exit


def test_a_later_rank_that_fails_ends_an_earlier_one() -> None:
    exit, results, _ = run(Task((60.0, 0.0), 1, failing=1), WorkerLimits(60.0))
    assert (exit.codes, exit.timed_out, exit.failed_rank) == ((None, 1), False, 1)
    assert exit.last_lines[1] == "ValueError: no more" and results == [(1, 0)]


def test_a_rank_that_makes_no_progress_is_ended() -> None:
    exit, results, _ = run(Task((60.0,), 1), WorkerLimits(0.5))
    assert (exit.codes, exit.timed_out, results) == ((None,), True, [])


def test_a_run_ends_at_its_limit_whatever_its_progress() -> None:
    exit, results, _ = run(Task((0.1,), 10_000), WorkerLimits(60.0, total_seconds=5.0))
    assert (exit.codes, exit.timed_out) == ((None,), True) and len(results) < 10_000
