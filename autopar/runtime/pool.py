"""Worker processes of a plain script or notebook: started, commanded, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from autopar.errors import UsageError, WorkerError
from autopar.runtime import wire
from autopar.runtime.rank import RankSpec
from autopar.runtime.settings import TorchSettings
from autopar.runtime.worker import Failure, Start

GRACE_SECONDS = 1.0  # after the first failure, for the rank that caused it to be heard too
EXIT_SECONDS = 3.0  # for a worker to leave by itself when its connection closes


class WorkerPool:
    """One worker process per rank on this machine.

    A worker that dies or raises ends all of them, and the call that was running raises one error. Workers end by
    themselves when this process does, however it ends: each watches its connection.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        tensors: Sequence[Mapping[str, torch.Tensor]],
        backend: str,
        timeout_seconds: float,
        num_threads: int,
    ) -> None:
        """Start the workers and hand each its weights.

        Args:
            tensors: each rank's weights by name.
            timeout_seconds: longest wait for a peer inside a step.
            num_threads: of each worker, on CPU.
        """
        self.failed: str | None = None
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, stop, self.processes, self.connections, EXIT_SECONDS)
        # No port to choose or to race for: the store picks a free one.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "OMP_NUM_THREADS": str(num_threads),
        }
        for spec in specs:
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "autopar.runtime", str(theirs.fileno()), str(spec.rank)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # keeps the terminal's Ctrl-C from the workers
                )
            )
            theirs.close()
            self.connections.append(ours)
        settings = TorchSettings.current()
        starts = [
            Start(
                cloudpickle.dumps(s), "127.0.0.1", self.store.port, backend, timeout_seconds, num_threads, settings
            )
            for s in specs
        ]
        self.call("start", [(start, dict(t)) for start, t in zip(starts, tensors, strict=True)])

    def call(self, name: str, arguments: Sequence[tuple]) -> dict[int, Any]:
        """Run one command on every rank, with its own arguments; the results by rank.

        Raises:
            WorkerError: a rank raised or died; all workers are ended.
            UsageError: the workers are gone already.
        """
        if self.failed is not None:
            raise UsageError(f"The workers are gone: {self.failed} Call autopar.parallelize again.")
        try:
            for rank, (connection, own) in enumerate(zip(self.connections, arguments, strict=True)):
                try:
                    wire.send(connection, (name, own))
                except OSError:
                    self.fail(name, {rank: None})
            return self.collect(name)
        except BaseException as error:
            if self.failed is None:
                self.failed = f"{type(error).__name__} during {name}."
            self.close(0.0)
            raise

    def collect(self, name: str) -> dict[int, Any]:
        """Wait for every rank's reply."""
        results: dict[int, Any] = {}
        while len(results) < len(self.connections):
            waiting = {c: r for r, c in enumerate(self.connections) if r not in results}
            for connection in wait(list(waiting)):
                rank = waiting[connection]  # type: ignore[index]
                ok, result = self.reply(rank)
                if not ok:
                    self.fail(name, {rank: result} | self.late_failures(set(results) | {rank}))
                results[rank] = result
        return dict(sorted(results.items()))

    def reply(self, rank: int) -> tuple[bool, Any]:
        """A rank's next reply; (False, None) when it died."""
        try:
            return wire.receive(self.connections[rank])
        except (EOFError, OSError):
            return False, None

    def late_failures(self, heard: set[int]) -> dict[int, Failure | None]:
        """Failures of other ranks in the next moment: the first to be heard is not always the cause."""
        failures: dict[int, Failure | None] = {}
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            waiting = {c: r for r, c in enumerate(self.connections) if r not in heard}
            for connection in wait(list(waiting), left) if waiting else []:
                rank = waiting[connection]  # type: ignore[index]
                heard.add(rank)
                ok, result = self.reply(rank)
                if not ok:
                    failures[rank] = result
            if not waiting:
                break
        return failures

    def fail(self, name: str, failures: Mapping[int, Failure | None]) -> None:
        """Raise the one error for a failed command. ``None`` stands for a rank that died."""
        dead = [r for r, f in failures.items() if f is None]
        if dead:
            code = self.exit_code(dead[0])
            self.failed = f"Rank {dead[0]} (stage {dead[0]}) died during {name}: {code}. All other ranks were ended."
            raise WorkerError(
                f"{self.failed} If nobody killed it, the system may have run out of memory: "
                "use more microbatches or more devices."
            )
        told = sorted((f for f in failures.values() if f is not None), key=lambda f: f.secondary)
        first = told[0]
        if first.user_error is not None:
            self.failed = str(first.user_error)
            raise first.user_error
        where = f" in action {first.action}" if first.action else ""
        self.failed = f"Rank {first.rank} (stage {first.rank}) failed during {name}{where}: {first.error}."
        others = "".join(f"\nRank {f.rank}, in action {f.action or name}: {f.error}" for f in told[1:])
        raise WorkerError(f"{self.failed} All other ranks were ended.\n\n{first.details.rstrip()}{others}")

    def exit_code(self, rank: int) -> str:
        """How a dead worker ended, in words."""
        try:
            code = self.processes[rank].wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self, patience_seconds: float = EXIT_SECONDS) -> None:
        """End all workers; those that do not leave in time are killed. May be called again."""
        if self.failed is None:
            self.failed = "closed."
        self._finalizer.detach()
        stop(self.processes, self.connections, patience_seconds)


def stop(processes: list[subprocess.Popen[bytes]], connections: list[Connection], patience_seconds: float) -> None:
    """Close the connections, wait for the workers to leave, kill the rest."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + patience_seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    connections.clear()
    processes.clear()
