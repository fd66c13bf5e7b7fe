"""Worker process, a fork of the fork server: runs one rank's commands until its caller closes the pool or is gone."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.comm.connect import connect_rank, init_process_group
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.commands import run_command
from autopar.runtime.engine.metrics import resolve
from autopar.runtime.launch.ipc import WorkerChannel
from autopar.runtime.launch.loopback import HOST
from autopar.runtime.launch.machine_fault import may_be_of_machine
from autopar.runtime.launch.shared_memory import SharedMemory
from autopar.runtime.memory.cuda_allocator import let_segments_grow
from autopar.runtime.memory.host_malloc import disable_malloc_trim
from autopar.runtime.memory.out_of_memory import lack_of_memory, out_of_memory
from autopar.runtime.memory.peaks import restart_peak
from autopar.runtime.rank import Rank
from autopar.runtime.spec import LazyMetrics, RankSpec, RankStepResult, StepNumbers

START_SECONDS = 300.0  # time for all workers to import their modules
WHERE = "where"  # message that asks a worker for its current position
LEAVE = "leave"  # message that ends a worker: its connection may stay open in forks of the caller
CHECK_SECONDS = 1.0  # between checks that the parent process lives, for the same reason
FLUSH_SECONDS = 1.0  # time for the last output; whoever reads it may be gone, or not be reading


@dataclass(frozen=True)
class Start:
    """Arguments with which a worker joins the process group. ``spec`` is a `RankSpec` pickled with user callables."""

    spec: bytes
    store_port: int
    backend: str
    timeout_seconds: float
    num_threads: int


@dataclass(frozen=True)
class Failure:
    """Reason why a rank stopped.

    Args:
        secondary: whether the rank only noticed that a peer was gone.
        of_machine: whether a compiler failed or the system refused a resource.
    """

    rank: int
    action: str
    error: str
    details: str
    secondary: bool
    user_error: AutoparError | None = None
    of_machine: bool = False


@dataclass(frozen=True)
class Position:
    """Where a rank is that has not replied yet.

    Args:
        action: as text; empty outside of steps.
        doing: continues "it is still".
        waits: whether it waits for another rank or for its GPU.
        stack: of the main thread.
    """

    rank: int
    action: str
    doing: str
    waits: bool
    stack: str

    @property
    def text(self) -> str:
        return self.doing + (f", in action {self.action}" if self.action else "")

    @property
    def failure(self) -> Failure:
        """The position as the reason why a command has failed."""
        return Failure(self.rank, self.action, f"no reply, it is still {self.doing}", self.stack, self.waits)


def main(number: int, connection: int, to_worker: int, to_caller: int) -> None:
    """Run rank ``number`` until the caller says `LEAVE`, closes the connection or is gone.

    Args:
        connection: open file of the connection.
        to_worker, to_caller: open files of shared memory, for tensors of commands and of replies.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # the caller handles them, and this process ends with it
        signal.signal(signal_number, signal.SIG_IGN)
    with suppress(OSError):  # only Linux has this file; ps and top show the name
        Path("/proc/self/comm").write_text(f"autopar:rank{number}")
    # torch 2.11 warns about its own class whenever a pickled tree spec is read.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    Worker(number, WorkerChannel(Connection(connection), SharedMemory(to_caller), SharedMemory(to_worker))).run()


class Worker:
    """Runs commands in its main thread. A second thread receives, and answers `WHERE` even if the main thread hangs."""

    def __init__(self, number: int, channel: WorkerChannel) -> None:
        self.number, self.channel = number, channel
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.parent = os.getppid()  # the fork server, which ends with the caller, or the caller
        self.start: Start | None = None
        self.spec: RankSpec | None = None
        self.tensors: dict[str, torch.Tensor] = {}  # weights, until the rank takes them
        self.rank: Rank | None = None
        self.reads = False  # whether the main thread waits for a step on the GPU
        self.begun: dict[int, StepNumbers | LazyMetrics] = {}  # of launched steps, not read by the caller yet

    def run(self) -> None:
        threading.Thread(target=self.listen, args=(threading.get_ident(),), daemon=True).start()
        while True:
            self.reply(self.execute(*self.commands.get()))

    def reply(self, reply: tuple[bool, Any]) -> None:
        try:
            encoded = self.channel.encode(reply)
        except Exception as error:
            error.add_note("autopar: this happened while the result was pickled for the caller")
            encoded = self.channel.encode((False, failure(self.number, self.rank, error)))
        with self.sending:
            try:
                self.channel.send(encoded)
            except OSError:
                exit_now()

    def execute(self, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Run one command. Returns whether it succeeded, and its result or `Failure`."""
        try:
            return True, self.result(name, arguments)
        except (Exception, SystemExit) as error:  # a user's module may call sys.exit() when it is imported
            lack = lack_of_memory(error)
            if lack is None or self.rank is None:
                return False, failure(self.number, self.rank, error)
            called = arguments[1] if name == "begin" else name
            return False, failure(self.number, self.rank, out_of_memory(self.rank, called, lack))

    def result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Result of a command: a method of the rank, or one of five commands of this class.

        "start" joins the process group, "weights" takes the rank's weights and "connect" builds the rank. "begin"
        launches a step, given its number, command and arguments; it returns once the step no longer reads borrowed
        tensors. "read" waits for that step and returns its numbers.
        """
        if name == "start":
            self.start = arguments[0]
            self.spec = join(self.number, arguments[0])
            return None
        assert self.start is not None and self.spec is not None, "the first command is start"
        if name == "weights":
            self.tensors = {key: tensor.to(self.spec.device) for key, tensor in arguments[0].items()}
            return None
        if name == "connect":
            tensors, self.tensors = self.tensors, {}
            # The end of the process closes everything.
            self.rank = connect_rank(self.spec, tensors, self.start.timeout_seconds, ExitStack())
            restart_peak()
            return None
        assert self.rank is not None, "connect comes before all commands of the rank"
        if name == "read":
            self.reads = True
            numbers = resolve(self.begun.pop(*arguments))
            self.reads = False
            return numbers
        with self.rank.active():
            if name == "begin":
                step, command, step_arguments = arguments
                self.begun[step] = run_command(self.rank, command, step_arguments).numbers
                return None
            result = run_command(self.rank, name, arguments)
            return replace(result, numbers=resolve(result.numbers)) if isinstance(result, RankStepResult) else result

    def listen(self, main_thread: int) -> None:
        """Queue commands as they arrive. End the process immediately once the caller is gone, even during a command."""
        while True:
            try:
                while not self.channel.connection.poll(CHECK_SECONDS):
                    if os.getppid() != self.parent:
                        exit_now()
                encoded = self.channel.receive()
            except (EOFError, OSError):
                exit_now()
            try:
                message = self.channel.decode(encoded)
            except Exception as error:
                self.reply((False, failure(self.number, self.rank, error)))
                continue
            if message == LEAVE:
                exit_now()
            elif message == WHERE:
                self.reply((False, self.position(main_thread)))
            else:
                self.commands.put(message)

    def position(self, main_thread: int) -> Position:
        """Current position of this rank."""
        step = self.rank.current_step if self.rank is not None else None
        waits = step is not None and step.current_action is not None and not step.computing
        doing = "waiting for its inputs" if waits else "waiting for its GPU" if self.reads else "computing"
        stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
        return Position(self.number, action_of(self.rank), doing, waits or self.reads, stack)


def exit_now() -> NoReturn:
    """End the process immediately, whatever becomes of its last output."""
    try:
        # Another thread: a full pipe, or the lock of a thread that waits for one, would hold up this one.
        flushing = threading.Thread(target=flush_output, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
    finally:
        os._exit(0)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or user code has closed it
            stream.flush()


def join(number: int, start: Start) -> RankSpec:
    """Join the process group; returns the spec of this rank."""
    torch.set_num_threads(start.num_threads)
    spec: RankSpec = pickle.loads(start.spec)
    spec.settings.apply()
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        let_segments_grow()  # before the weights arrive
    else:
        disable_malloc_trim()
    world = spec.mesh.devices
    store = dist.TCPStore(HOST, start.store_port, world, is_master=False)
    # Processes start seconds apart; the step's timeout may be shorter.
    store.set(f"started/{number}", "")
    store.wait([f"started/{rank}" for rank in range(world)], timedelta(seconds=START_SECONDS))
    init_process_group(start.backend, number, world, device, start.timeout_seconds, store)
    torch.manual_seed(spec.rank_seed)
    return spec


def failure(number: int, rank: Rank | None, error: BaseException) -> Failure:
    """Failure that reports an exception to the caller."""
    return Failure(
        number,
        action_of(rank),
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
        isinstance(error, TransportError | dist.DistError),
        error if isinstance(error, AutoparError) else None,
        may_be_of_machine(error),
    )


def action_of(rank: Rank | None) -> str:
    """Current action of a rank, as text; empty outside steps."""
    action = rank.current_step.current_action if rank is not None and rank.current_step is not None else None
    return str(action) if action is not None else ""
