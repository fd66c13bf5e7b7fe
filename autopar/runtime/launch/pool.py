"""Worker processes of a plain script or notebook. They start, run commands and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import SEE_DOCTOR, UsageError, WorkerError
from autopar.runtime.commands import COMMANDS, command_named
from autopar.runtime.engine.metrics import StepLimit
from autopar.runtime.launch.fork_server import Process, fork_server, prepare, worker_environment
from autopar.runtime.launch.interrupt import interrupt_at_end
from autopar.runtime.launch.ipc import Message, WorkerChannel, find_unpicklable, limit_waits, pickled
from autopar.runtime.launch.loopback import loopback_store
from autopar.runtime.launch.replies import GRACE_SECONDS, Replies
from autopar.runtime.launch.shared_memory import SharedMemory, shared_file
from autopar.runtime.launch.worker import LEAVE, START_SECONDS, Failure, Start, main
from autopar.runtime.spec import RankSpec, RankStepResult, StepNumbers, rank_text

STARTING = ("start", "weights", "connect")  # commands of a worker before its rank answers
EXIT_SECONDS = 3.0  # time for a worker to end by itself once it was told to leave


class WorkerPool:
    """One worker process per rank on this machine.

    If a worker dies or raises, all workers are ended and the running call raises one error. Workers end by themselves
    when this process ends in any way: each watches its connection and its parent. Several threads may call and read
    results; one command runs at a time.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        tensors: Iterable[Mapping[str, torch.Tensor]],
        backend: str,
        timeout_seconds: float,
        num_threads: int,
    ) -> None:
        """Start the workers and send each its weights.

        Args:
            tensors: each rank's weights by name. One rank's are taken at a time and are sent before the next: memory
                is needed once for all ranks.
            timeout_seconds: maximal wait for a peer inside a step.
            num_threads: number of CPU threads of each worker.
        """
        self.mesh, self.placement = specs[0].mesh, specs[0].placement
        self.numbers: Sequence[int] = range(len(specs))  # all ranks: this process commands all of them
        pickled = [pickled_spec(spec) for spec in specs]  # before any process starts
        self.failed: str | None = None
        self.limit, self.checkpoint_seconds = StepLimit(timeout_seconds), specs[0].checkpoint_seconds
        self.lock = threading.RLock()  # held from the first message of a command to the last reply
        self.call_seconds = 0.0  # duration of the last call, with transfer of arguments and results
        self.begun: dict[int, str] = {}  # names of launched steps that are not read yet, by number
        self.num_begun = 0
        self.on_gpu = [torch.device(spec.device).type == "cuda" for spec in specs]
        self.channels: list[WorkerChannel] = []
        prepare(num_threads)  # before the finalizer: at the interpreter's exit, the last finalizer runs first
        self.processes: list[Process] = []
        self._finalizer = weakref.finalize(self, stop, self.processes, self.channels, EXIT_SECONDS)
        self.store: dist.TCPStore | None = loopback_store()  # the workers' until they end
        environment, port = worker_environment(num_threads), self.store.port
        try:
            for spec in specs:
                self.start(spec.rank, environment)
            starts = [Start(spec, port, backend, timeout_seconds, num_threads) for spec in pickled]
            self.carry_out("start", "start", {rank: (start,) for rank, start in enumerate(starts)})
            for rank, own in enumerate(tensors):
                self.carry_out("weights", "start", {rank: (dict(own),)}, borrowed=True)
                self.channels[rank].sending.clear()
                del own  # before the next rank's weights are made
            self.carry_out("connect", "start", dict.fromkeys(self.numbers, ()))
        except BaseException:
            self.close(0.0)
            raise

    def start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start the worker of a rank; it waits for its first command."""
        ours, theirs = Pipe()
        limit_waits(ours, self.limit.seconds)
        to_worker, to_caller = shared_file(), shared_file()
        self.channels.append(WorkerChannel(ours, SharedMemory(to_worker), SharedMemory(to_caller)))
        with theirs:
            server, files = fork_server(environment), (theirs.fileno(), to_worker, to_caller)
            self.processes.append(server.start(main, rank, environment=environment, files=files))

    def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Run one command on every rank, with that rank's arguments. Returns the results by rank.

        Raises:
            WorkerError: a rank raised or died; all workers are ended.
            UsageError: the workers are already gone, or an argument cannot be sent; then no worker got the command.
        """
        command = command_named(name)
        if command.is_step and all(self.on_gpu) and not any(own[0].keep_outputs for own in arguments.values()):
            return self.begin(name, arguments)
        with interrupt_at_end(name) if command.reads_only else nullcontext():
            return self.carry_out(name, name, arguments, command.borrows_inputs)

    def begin(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Launch a step and return outcomes that are read later, so that the caller can prepare the next step."""
        with self.lock:
            step, self.num_begun = self.num_begun, self.num_begun + 1
            self.carry_out("begin", name, {rank: (step, name, own) for rank, own in arguments.items()}, True)
            self.begun[step] = f"{name} of step {arguments[0][0].num_updates}"
        numbers: list[StepNumbers] = []  # once they are read

        def read() -> StepNumbers:
            with self.lock, interrupt_at_end(f"the wait for {name}"):
                if not numbers:
                    numbers.append(self.read(step))
            return numbers[0]

        return {rank: RankStepResult(read, []) for rank in self.numbers}

    def read(self, step: int) -> StepNumbers:
        """Numbers of a launched step, after a wait for its end; the time is the slowest rank's.

        All ranks are read, although each has the numbers: an error of a GPU appears only in a wait for that GPU.
        """
        self.check_open()
        results = self.carry_out("read", self.begun[step], dict.fromkeys(self.numbers, (step,)))
        del self.begun[step]
        seconds = [result.device_seconds for result in results.values() if result.device_seconds is not None]
        self.limit.count(max(seconds, default=0.0))
        return replace(results[max(results)], device_seconds=max(seconds, default=None))

    def check_open(self) -> None:
        """Raise a UsageError if the workers are gone."""
        if self.failed is not None:
            raise UsageError(f"The workers are gone: {self.failed} Call autopar.parallelize again.")

    def carry_out(
        self, command: str, name: str, arguments: Mapping[int, tuple[Any, ...]], borrowed: bool = False
    ) -> dict[int, Any]:
        """Send a command to the ranks that ``arguments`` names and wait for their replies, as `Replies` does.

        Args:
            name: name of the command in errors.
            borrowed: whether workers on GPUs read the arguments' tensors in shared memory.
        """
        with self.lock:
            self.check_open()
            start = time.perf_counter()
            messages = {rank: self.encoded(rank, command, name, own, borrowed) for rank, own in arguments.items()}
            seconds = self.seconds(command)
            try:
                for rank, message in messages.items():
                    try:
                        with suppress(BlockingIOError):  # the worker is stopped: it will not reply either
                            self.channels[rank].send(message)
                    except OSError:
                        self.fail(name, {rank: None})
                channels = {rank: self.channels[rank] for rank in messages}
                # The first reply may be that of a rank which has waited for a peer in vain for as long.
                replies = Replies(name, channels, seconds + GRACE_SECONDS, seconds)
                if not replies.collect():
                    self.fail(name, replies.failures)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self.failed = f"Ctrl-C during {name}, which some ranks may have done and others not."
                elif self.failed is None:
                    self.failed = f"{type(error).__name__} during {name}."
                self.close(0.0)
                raise
            self.call_seconds = time.perf_counter() - start
            return dict(sorted(replies.results.items()))

    def encoded(self, rank: int, command: str, name: str, own: tuple[Any, ...], borrowed: bool) -> Message:
        """Message of a command to one rank.

        Raises:
            UsageError: an argument cannot be pickled, or shared memory has no room for its tensors.
        """
        try:
            return self.channels[rank].encode((command, own), lend=self.on_gpu[rank] and borrowed)
        except OSError as error:
            remedy = "Give" if name == "start" else "No worker received the call. Use a smaller batch, or give"
            raise UsageError(
                f"{name} has no room for the tensors of {rank_text(self.mesh, rank, self.placement)}, which travel "
                f"through shared memory: {error.strerror}. {remedy} the machine or container more memory. {SEE_DOCTOR}"
            ) from error
        except Exception as error:
            raise cannot_send(name, own, "arguments", error) from error

    def seconds(self, command: str) -> float:
        """Longest wait for a reply to a command of ranks or workers."""
        if command in STARTING:
            return max(self.limit.seconds, START_SECONDS)
        of_rank = COMMANDS.get(command)
        return self.checkpoint_seconds if of_rank is not None and of_rank.uses_files else self.limit.seconds

    def fail(self, name: str, failures: Mapping[int, Failure | None]) -> None:
        """Raise the one error of a failed command. A failure of None stands for a rank that died."""
        dead = [r for r, f in failures.items() if f is None]
        if dead:
            code = self.exit_code(dead[0])
            rank = rank_text(self.mesh, dead[0], self.placement).capitalize()
            self.failed = f"{rank} died during {name}: {code}. All other ranks were ended."
            reason = (
                "If nobody killed it, the system may have run out of memory: use more microbatches or more devices."
                if self.processes[dead[0]].returncode == -signal.SIGKILL
                else "It wrote what it had to say to stderr, which notebooks show in the terminal of their server."
            )
            raise WorkerError(f"{self.failed} {reason} {SEE_DOCTOR}")
        ordered = sorted((f for f in failures.values() if f is not None), key=lambda f: f.secondary)
        first = ordered[0]
        if first.user_error is not None:
            self.failed = str(first.user_error)
            raise first.user_error
        where = f" in action {first.action}" if first.action else ""
        error = first.error.removesuffix(".")
        rank = rank_text(self.mesh, first.rank, self.placement).capitalize()
        self.failed = f"{rank} failed during {name}{where}: {error}."
        earlier = ", ".join(other for other in self.begun.values() if other != name)
        before = (
            f" A GPU's error may come from what was launched before and not read yet: {earlier}." if earlier else ""
        )
        others = "".join(f"\nRank {f.rank}, in action {f.action or name}: {f.error}" for f in ordered[1:])
        before += f" {SEE_DOCTOR}" if first.secondary or first.of_machine else ""
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
        with self.lock:
            if self.failed is None:
                self.failed = "closed."
            self._finalizer.detach()
            stop(self.processes, self.channels, patience_seconds)
            self.store = None  # closes its port and ends its thread


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
    """Tell the workers to leave, wait for them to end, kill the rest."""
    for process, channel in zip(processes, channels):
        if patience_seconds and process.owner == os.getpid():
            channel.tell(LEAVE)
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
