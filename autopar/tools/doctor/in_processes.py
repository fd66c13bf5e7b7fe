"""Work that may crash or hang, in processes of its own: forks of the server that starts ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.errors import WorkerError
from autopar.measure.workers import WorkerLimits, WorkersExit, run_workers
from autopar.runtime.launch.devices import rank_threads
from autopar.runtime.launch.fork_server import FORKS, ForkServer, fork_server, how_ended, worker_environment

PROCESSES = 2  # at most two compute at the same time on CPU, so all share one server with half of the processors
GRACE_SECONDS = 1.0  # for other processes to end by themselves once one has failed


def start_server() -> ForkServer | None:
    """The server that processes are forks of, started if it is not there; None where processes cannot be forked."""
    return fork_server(worker_environment(rank_threads(PROCESSES, None))) if FORKS else None


def run_in_processes(
    entry: str,
    payload: object,
    world: int,
    limit_seconds: float,
    on_result: Callable[[Any], None],
) -> None:
    """Run an entry function, as `run_workers` does, until its processes have ended.

    Args:
        world: number of processes.
        on_result: called with each result that a process emits.

    Raises:
        WorkerError: a process failed or took too long; the message is its last line.
    """

    def take(rank: int, result: Any) -> bool:
        on_result(result)
        return False  # the time limit is that of all results

    limits, threads = WorkerLimits(limit_seconds, GRACE_SECONDS), rank_threads(PROCESSES, None)
    ended = run_workers(entry, payload, world, threads, limits, take, name="doctor", server=start_server())
    if (failure := failure_of(ended, limit_seconds)) is not None:
        raise WorkerError(failure)


def result_in_process(entry: str, payload: object, limit_seconds: float) -> Any:
    """The result that an entry function emits in a process.

    Raises:
        WorkerError: as `run_in_processes`.
    """
    results: list[Any] = []
    run_in_processes(entry, payload, 1, limit_seconds, results.append)
    (result,) = results
    return result


def failure_of(ended: WorkersExit, limit_seconds: float) -> str | None:
    """Reason why processes failed; None if they did not."""
    rank = ended.failed_rank
    if rank is not None:
        code, line = ended.codes[rank], ended.last_lines[rank].removesuffix(".")
        return line if code is not None and code > 0 else f"the process was {how_ended(code or 0)} after: {line}"
    return f"no answer within {limit_seconds:.0f} s" if ended.timed_out else None
