"""Worker processes of a plain script or notebook. They start, run commands and end together."""

from __future__ import annotations

import functools
import subprocess
import time
import traceback
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import UsageError, WorkerError
from autopar.runtime.commands import command_named
from autopar.runtime.launch.fork_server import Process, fork_server, prepare, worker_environment
from autopar.runtime.launch.ipc import Message, WorkerChannel, find_unpicklable, pickled
from autopar.runtime.launch.shared_memory import SharedMemory, shared_file
from autopar.runtime.launch.torch_settings import TorchSettings
from autopar.runtime.launch.worker import START_SECONDS, WHERE, Failure, Start, main
from autopar.runtime.spec import RankSpec, RankStepResult, StepNumbers, rank_text

GRACE_SECONDS = 1.0  # after the first failure, to receive the failure of the rank that caused it
EXIT_SECONDS = 3.0  # time for a worker to end by itself once its connection is closed


class WorkerPool:
    """One worker process per rank on this machine.

    If a worker dies or raises, all workers are ended and the running call raises one error. Workers end by themselves
    when this process ends in any way: each watches its connection.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        tensors: Sequence[Mapping[str, torch.Tensor]],
        backend: str,
        timeout_seconds: float,
        num_threads: int,
    ) -> None:
        """Start the workers and send each its weights.

        Args:
            tensors: each rank's weights by name.
            timeout_seconds: maximal wait for a peer inside a step.
            num_threads: number of CPU threads of each worker.
        """
        settings = TorchSettings.current()
        self.mesh = specs[0].mesh
        self.numbers: Sequence[int] = range(len(specs))  # all ranks: this process commands all of them
        pickled = [pickled_spec(spec) for spec in specs]  # before any process starts
        self.failed: str | None = None
        self.timeout_seconds = timeout_seconds
        self.call_seconds = 0.0  # duration of the last call, with transfer of arguments and results
        self.begun: dict[int, str] = {}  # names of launched steps that are not read yet, by number
        self.num_begun = 0
        self.on_gpu = [torch.device(spec.device).type == "cuda" for spec in specs]
        self.channels: list[WorkerChannel] = []
        prepare(num_threads)  # before the finalizer: at the interpreter's exit, the last finalizer runs first
        self.processes: list[Process] = []
        self._finalizer = weakref.finalize(self, stop, self.processes, self.channels, EXIT_SECONDS)
        # Port 0: the store picks a free port, so that no other process can take it first.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = worker_environment(num_threads)
        try:
            for spec in specs:
                self.start(spec.rank, environment)
        except BaseException:
            self.close(0.0)
            raise
        starts = [
            Start(spec, "127.0.0.1", self.store.port, backend, timeout_seconds, num_threads, settings)
            for spec in pickled
        ]
        weights = enumerate(zip(starts, tensors, strict=True))
        self.carry_out("start", "start", {rank: (start, dict(t)) for rank, (start, t) in weights})

    def start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start the worker of a rank; it waits for its first command."""
        ours, theirs = Pipe()
        to_worker, to_caller = shared_file(), shared_file()
        self.channels.append(WorkerChannel(ours, SharedMemory(to_worker), SharedMemory(to_caller)))
        with theirs:
            server, files = fork_server(environment), (theirs.fileno(), to_worker, to_caller)
            self.processes.append(server.start(main, rank, environment=environment, files=files))

    def call(self, name: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        """Run one command on every rank, with that rank's arguments. Returns the results by rank.

        Raises:
            WorkerError: a rank raised or died; all workers are ended.
            UsageError: the workers are already gone, or an argument cannot be sent; then no worker got the command.
        """
        command = command_named(name)
        if command.is_step and all(self.on_gpu) and not any(own[0].keep_outputs for own in arguments.values()):
            return self.begin(name, arguments)
        return self.carry_out(name, name, arguments, command.borrows_inputs)

    def begin(self, name: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        """Launch a step and return outcomes that are read later, so that the caller can prepare the next step."""
        step, self.num_begun = self.num_begun, self.num_begun + 1
        self.carry_out("begin", name, {rank: (step, name, own) for rank, own in arguments.items()}, True)
        self.begun[step] = f"{name} of step {arguments[0][0].num_updates}"
        read = functools.cache(lambda: self.read(step))
        return {rank: RankStepResult(read, []) for rank in self.numbers}

    def read(self, step: int) -> StepNumbers:
        """Numbers of a launched step, after a wait for its end; the time is the slowest rank's.

        All ranks are read, although each has the numbers: an error of a GPU appears only in a wait for that GPU.
        """
        results = self.carry_out("read", self.begun[step], dict.fromkeys(self.numbers, (step,)))
        del self.begun[step]
        seconds = [result.device_seconds for result in results.values() if result.device_seconds is not None]
        return replace(results[max(results)], device_seconds=max(seconds, default=None))

    def carry_out(
        self, command: str, name: str, arguments: Mapping[int, tuple], borrowed: bool = False
    ) -> dict[int, Any]:
        """Send a command to all workers and wait for their replies.

        Args:
            name: name of the command in errors.
            borrowed: whether workers on GPUs read the arguments' tensors in shared memory.
        """
        if self.failed is not None:
            raise UsageError(f"The workers are gone: {self.failed} Call autopar.parallelize again.")
        start = time.perf_counter()
        messages = [self.encoded(rank, command, name, arguments[rank], borrowed) for rank in self.numbers]
        try:
            for rank, (channel, message) in enumerate(zip(self.channels, messages, strict=True)):
                try:
                    channel.send(message)
                except OSError:
                    self.fail(name, {rank: None})
            results = self.collect(name)
        except BaseException as error:
            if self.failed is None:
                self.failed = f"{type(error).__name__} during {name}."
            self.close(0.0)
            raise
        self.call_seconds = time.perf_counter() - start
        return results

    def encoded(self, rank: int, command: str, name: str, own: tuple, borrowed: bool) -> Message:
        """Message of a command to one rank.

        Raises:
            UsageError: an argument cannot be pickled, or shared memory has no room for its tensors.
        """
        try:
            return self.channels[rank].encode((command, own), lend=self.on_gpu[rank] and borrowed)
        except OSError as error:
            raise UsageError(
                f"{name} has no room for the tensors of {rank_text(self.mesh, rank)}, which travel through shared "
                f"memory: {error.strerror}. No worker received the call. Use a smaller batch, or give the machine or "
                "container more memory."
            ) from error
        except Exception as error:
            raise cannot_send(name, own, "arguments", error) from error

    def collect(self, name: str) -> dict[int, Any]:
        """Results by rank. After the first reply, the wait for each further reply is limited to the timeout."""
        results: dict[int, Any] = {}
        patience = max(self.timeout_seconds, START_SECONDS) if name == "start" else self.timeout_seconds
        while len(results) < len(self.channels):
            silent = set(range(len(self.channels))) - set(results)
            replies = self.replies(silent, patience if results else None)
            results |= {rank: result for rank, (ok, result) in replies.items() if ok}
            failures = {rank: result for rank, (ok, result) in replies.items() if not ok}
            if failures or not replies:
                self.fail(name, self.reasons(failures, silent - set(replies)))
        return dict(sorted(results.items()))

    def replies(self, silent: Collection[int], seconds: float | None) -> dict[int, tuple[bool, Any]]:
        """First replies to arrive, by rank; empty if none arrives in time. A rank that died has (False, None)."""
        arrived: dict[int, tuple[bool, Any]] = {}
        waiting = {self.channels[rank].connection: rank for rank in silent}
        for connection in wait(list(waiting), seconds):
            rank = waiting[connection]  # type: ignore[index]
            try:
                reply = self.channels[rank].receive()
            except (EOFError, OSError):
                arrived[rank] = (False, None)
                continue
            try:
                arrived[rank] = self.channels[rank].decode(reply)
            except Exception as error:
                details = "".join(traceback.format_exception(error))
                arrived[rank] = (False, Failure(rank, "", f"its reply cannot be read: {error!r}", details, False))
        return arrived

    def reasons(self, failures: dict[int, Failure | None], silent: set[int]) -> dict[int, Failure | None]:
        """All known failures of a command by rank: the first rank to reply is not always the cause.

        If every failed rank only noticed that a peer is silent, the silent ranks are asked for their positions.
        """
        failures = failures | self.late_failures(silent)
        if all(f is not None and f.secondary for f in failures.values()):
            for rank in silent:
                with suppress(OSError):  # the closed connection shows that the worker died
                    self.channels[rank].send(self.channels[rank].encode(WHERE))
            failures |= self.late_failures(silent)
            failures |= {r: Failure(r, "", "no reply, and it does not say where it is", "", False) for r in silent}
        return failures

    def late_failures(self, silent: set[int]) -> dict[int, Failure | None]:
        """Failures of other ranks within `GRACE_SECONDS`. Ranks that reply are removed from ``silent``."""
        failures: dict[int, Failure | None] = {}
        deadline = time.monotonic() + GRACE_SECONDS
        while silent and (left := deadline - time.monotonic()) > 0:
            for rank, (ok, result) in self.replies(silent, left).items():
                silent.remove(rank)
                if not ok:
                    failures[rank] = result
        return failures

    def fail(self, name: str, failures: Mapping[int, Failure | None]) -> None:
        """Raise the one error of a failed command. A failure of None stands for a rank that died."""
        dead = [r for r, f in failures.items() if f is None]
        if dead:
            code = self.exit_code(dead[0])
            self.failed = (
                f"{rank_text(self.mesh, dead[0]).capitalize()} died during {name}: {code}. All other ranks were ended."
            )
            reason = (
                "If nobody killed it, the system may have run out of memory: use more microbatches or more devices."
                if "SIGKILL" in code
                else "It wrote what it had to say to stderr, which notebooks show in the terminal of their server."
            )
            raise WorkerError(f"{self.failed} {reason}")
        ordered = sorted((f for f in failures.values() if f is not None), key=lambda f: f.secondary)
        first = ordered[0]
        if first.user_error is not None:
            self.failed = str(first.user_error)
            raise first.user_error
        where = f" in action {first.action}" if first.action else ""
        error = first.error.removesuffix(".")
        self.failed = f"{rank_text(self.mesh, first.rank).capitalize()} failed during {name}{where}: {error}."
        earlier = ", ".join(other for other in self.begun.values() if other != name)
        before = (
            f" A GPU's error may come from what was launched before and not read yet: {earlier}." if earlier else ""
        )
        others = "".join(f"\nRank {f.rank}, in action {f.action or name}: {f.error}" for f in ordered[1:])
        raise WorkerError(f"{self.failed} All other ranks were ended.{before}\n\n{first.details.rstrip()}{others}")

    def exit_code(self, rank: int) -> str:
        """Way in which a dead worker ended, as text."""
        try:
            self.processes[rank].wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return self.processes[rank].ending()

    def close(self, patience_seconds: float = EXIT_SECONDS) -> None:
        """End all workers; kill those that still run after ``patience_seconds``. May be called again."""
        if self.failed is None:
            self.failed = "closed."
        self._finalizer.detach()
        stop(self.processes, self.channels, patience_seconds)


def pickled_spec(spec: RankSpec) -> bytes:
    """Spec of a rank, pickled with the user's callables.

    Raises:
        UsageError: a callable cannot be pickled.
    """
    try:
        return pickled(spec)
    except Exception as error:
        raise cannot_send("parallelize", spec, "", error) from error


def cannot_send(command: str, thing: Any, name: str, error: Exception) -> UsageError:
    """Error that names the part of an argument which cannot be pickled."""
    where = find_unpicklable(thing, name).removeprefix(".").removeprefix("recipe.")
    return UsageError(
        f"{command} cannot send {where}, to the worker processes: {error}. No worker received the call. "
        "Pass tensors and plain data, and open files, locks and connections inside the functions that use them."
    )


def stop(processes: list[Process], channels: list[WorkerChannel], patience_seconds: float) -> None:
    """Close the channels, wait for the workers to end, kill the rest."""
    for channel in channels:
        channel.close()
    deadline = time.monotonic() + patience_seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    channels.clear()
    processes.clear()
