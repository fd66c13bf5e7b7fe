"""Worker process, a fork of the fork server: runs one rank's commands until its connection closes."""

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
from autopar.runtime.launch.shared_memory import SharedMemory
from autopar.runtime.launch.torch_settings import TorchSettings
from autopar.runtime.memory.host_malloc import disable_malloc_trim
from autopar.runtime.memory.out_of_memory import lack_of_memory, out_of_memory
from autopar.runtime.memory.peaks import restart_peak
from autopar.runtime.rank import Rank
from autopar.runtime.spec import LazyMetrics, RankSpec, RankStepResult, StepNumbers

START_SECONDS = 300.0  # time for all workers to import their modules
WHERE = "where"  # message that asks a worker for its current position


@dataclass(frozen=True)
class Start:
    """Arguments with which a worker joins the process group. ``spec`` is a `RankSpec` pickled with user callables."""

    spec: bytes
    store_host: str
    store_port: int
    backend: str
    timeout_seconds: float
    num_threads: int
    settings: TorchSettings


@dataclass(frozen=True)
class Failure:
    """Reason why a rank stopped. ``secondary`` if the rank only noticed that a peer was gone."""

    rank: int
    action: str
    error: str
    details: str
    secondary: bool
    user_error: AutoparError | None = None


def main(number: int, connection: int, to_worker: int, to_caller: int) -> None:
    """Run rank ``number`` until the caller closes the connection or is gone.

    Args:
        connection: open file of the connection.
        to_worker, to_caller: open files of shared memory, for tensors of commands and of replies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
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
        self.rank: Rank | None = None
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

    def execute(self, name: str, arguments: tuple) -> tuple[bool, Any]:
        """Run one command. Returns whether it succeeded, and its result or `Failure`."""
        try:
            return True, self.result(name, arguments)
        except Exception as error:
            lack = lack_of_memory(error)
            if lack is None or self.rank is None:
                return False, failure(self.number, self.rank, error)
            called = arguments[1] if name == "begin" else name
            return False, failure(self.number, self.rank, out_of_memory(self.rank, called, lack))

    def result(self, name: str, arguments: tuple) -> Any:
        """Result of a command: a method of the rank, or one of three commands of this class.

        "start" builds the rank. "begin" launches a step, given its number, command and arguments; it returns once the
        step no longer reads borrowed tensors. "read" waits for that step and returns its numbers.
        """
        if name == "start":
            self.rank = join(self.number, *arguments)
            return None
        assert self.rank is not None, "the first command is start"
        if name == "read":
            return resolve(self.begun.pop(*arguments))
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
                encoded = self.channel.receive()
            except (EOFError, OSError):
                exit_now()
            try:
                message = self.channel.decode(encoded)
            except Exception as error:
                self.reply((False, failure(self.number, self.rank, error)))
                continue
            if message == WHERE:
                self.reply((False, self.position(main_thread)))
            else:
                self.commands.put(message)

    def position(self, main_thread: int) -> Failure:
        """Current position of this rank, as the reason why it has not replied."""
        step = self.rank.current_step if self.rank is not None else None
        waiting = step is not None and step.current_action is not None and not step.computing
        return Failure(
            self.number,
            action_of(self.rank),
            f"no reply, it is still {'waiting for its inputs' if waiting else 'computing'}",
            "".join(traceback.format_stack(sys._current_frames()[main_thread])),
            secondary=waiting,
        )


def exit_now() -> NoReturn:
    """End the process immediately, because the caller is gone."""
    sys.stdout.flush()
    os._exit(0)


def join(number: int, start: Start, tensors: dict[str, torch.Tensor]) -> Rank:
    """Join the process group and build this rank with its weights, by name."""
    torch.set_num_threads(start.num_threads)
    start.settings.apply()
    spec: RankSpec = pickle.loads(start.spec)
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        disable_malloc_trim()
    world = spec.mesh.devices
    store = dist.TCPStore(start.store_host, start.store_port, world, is_master=False)
    # Processes start seconds apart; the step's timeout may be shorter.
    store.set(f"started/{number}", "")
    store.wait([f"started/{rank}" for rank in range(world)], timedelta(seconds=START_SECONDS))
    init_process_group(start.backend, number, world, device, start.timeout_seconds, store)
    torch.manual_seed(spec.rank_seed)
    rank = connect_rank(spec, tensors, start.timeout_seconds, ExitStack())  # the end of the process closes everything
    restart_peak()
    return rank


def failure(number: int, rank: Rank | None, error: Exception) -> Failure:
    """Failure that reports an exception to the caller."""
    return Failure(
        number,
        action_of(rank),
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
        isinstance(error, TransportError | dist.DistError),
        error if isinstance(error, AutoparError) else None,
    )


def action_of(rank: Rank | None) -> str:
    """Current action of a rank, as text; empty outside steps."""
    action = rank.current_step.current_action if rank is not None and rank.current_step is not None else None
    return str(action) if action is not None else ""
