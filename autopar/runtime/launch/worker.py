"""A worker process, which is a fork of the fork server. Obeys commands until its connection closes."""

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
from autopar.runtime.engine.metrics import resolve
from autopar.runtime.launch.ipc import WorkerChannel
from autopar.runtime.launch.shared_memory import SharedMemory
from autopar.runtime.launch.torch_settings import TorchSettings
from autopar.runtime.memory.out_of_memory import lack_of_memory, out_of_memory
from autopar.runtime.memory.peaks import restart_peak
from autopar.runtime.rank import Rank
from autopar.runtime.spec import LazyMetrics, RankSpec, RankStepResult, StepNumbers

START_SECONDS = 300.0  # for all workers to import what they need
WHERE = "where"  # the message that asks a worker for its position


@dataclass(frozen=True)
class Start:
    """How a worker meets the others. ``spec`` is a pickled `RankSpec`: it holds the user's callables."""

    spec: bytes
    store_host: str
    store_port: int
    backend: str
    timeout_seconds: float
    num_threads: int
    settings: TorchSettings


@dataclass(frozen=True)
class Failure:
    """Why a rank stopped. ``secondary`` when it only noticed that a peer was gone."""

    rank: int
    action: str
    error: str
    details: str
    secondary: bool
    user_error: AutoparError | None = None


def main(number: int, connection: int, there: int, back: int) -> None:
    """Run until the caller closes the connection or is gone.

    Args:
        connection, there, back: open files that join this worker with the caller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    with suppress(OSError):  # only Linux has this file; ps and top show the name
        Path("/proc/self/comm").write_text(f"autopar:rank{number}")
    # torch 2.11 warns about its own class whenever a pickled tree spec is read.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    Worker(number, WorkerChannel(Connection(connection), SharedMemory(back), SharedMemory(there))).run()


class Worker:
    """Obeys the caller in its main thread; a second thread listens, and answers `WHERE` even while the first hangs."""

    def __init__(self, number: int, line: WorkerChannel) -> None:
        self.number, self.channel = number, line
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.speaking = threading.Lock()
        self.rank: Rank | None = None
        self.begun: dict[int, StepNumbers | LazyMetrics] = {}  # of steps that nobody has asked about yet

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
        with self.speaking:
            try:
                self.channel.send(encoded)
            except OSError:
                exit_now()

    def execute(self, name: str, arguments: tuple) -> tuple[bool, Any]:
        """Carry out one command; whether it went well, and its result or failure."""
        try:
            return True, self.result(name, arguments)
        except Exception as error:
            lack = lack_of_memory(error)
            if lack is None or self.rank is None:
                return False, failure(self.number, self.rank, error)
            called = arguments[1] if name == "begin" else name
            return False, failure(self.number, self.rank, out_of_memory(self.rank, called, lack))

    def result(self, name: str, arguments: tuple) -> Any:
        """What a command returns: one of the rank's, or of this class's own.

        "start" makes the rank. "begin" launches a step, by number, command and arguments, and returns once it no longer
        reads what was lent; "read" waits for that step and returns its numbers.
        """
        if name == "start":
            self.rank = join(self.number, *arguments)
            return None
        assert self.rank is not None, "the first command is start"
        if name == "read":
            return resolve(self.begun.pop(*arguments))
        with self.rank.active():
            if name == "begin":
                step, command, own = arguments
                self.begun[step] = getattr(self.rank, command)(*own).numbers
                return None
            result = getattr(self.rank, name)(*arguments)
            return replace(result, numbers=resolve(result.numbers)) if isinstance(result, RankStepResult) else result

    def listen(self, main_thread: int) -> None:
        """Queue commands as they come; end the process at once when the caller is gone, whatever it is doing."""
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
        """What this rank is doing, as the reason why it has not replied."""
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
    """End the process at once: the caller is gone."""
    sys.stdout.flush()
    os._exit(0)


def join(number: int, start: Start, tensors: dict[str, torch.Tensor]) -> Rank:
    """Meet the other ranks and take this rank's weights."""
    torch.set_num_threads(start.num_threads)
    start.settings.apply()
    spec: RankSpec = pickle.loads(start.spec)
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = spec.mesh.devices
    store = dist.TCPStore(start.store_host, start.store_port, world, is_master=False)
    # Processes start seconds apart, and the step's timeout may be shorter than that.
    store.set(f"started/{number}", "")
    store.wait([f"started/{rank}" for rank in range(world)], timedelta(seconds=START_SECONDS))
    init_process_group(start.backend, number, world, device, start.timeout_seconds, store)
    torch.manual_seed(spec.rank_seed)
    rank = connect_rank(spec, tensors, start.timeout_seconds, ExitStack())  # the process's end closes all
    restart_peak()
    return rank


def failure(number: int, rank: Rank | None, error: Exception) -> Failure:
    """What the caller is told about an exception."""
    return Failure(
        number,
        action_of(rank),
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
        isinstance(error, TransportError | dist.DistError),
        error if isinstance(error, AutoparError) else None,
    )


def action_of(rank: Rank | None) -> str:
    """The action a rank is in; empty outside steps."""
    action = rank.current_step.current_action if rank is not None and rank.current_step is not None else None
    return str(action) if action is not None else ""
