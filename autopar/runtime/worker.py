"""A worker process: ``python -m autopar.runtime FD RANK``. Obeys commands until its connection closes."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.rank import Rank, RankSpec
from autopar.runtime.settings import TorchSettings
from autopar.runtime.transport import ProcessGroupTransport, TransportError, init_process_group
from autopar.runtime.wire import receive, send


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


def main() -> None:
    """Run until the caller closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    # torch 2.11 warns about its own class whenever a pickled tree spec is read.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    connection, number = Connection(int(sys.argv[1])), int(sys.argv[2])
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(connection, commands), daemon=True).start()
    rank: Rank | None = None
    while True:
        name, arguments = commands.get()
        try:
            if name == "start":
                rank = join(number, *arguments)
                result = None
            else:
                result = getattr(rank, name)(*arguments)
            reply = (True, result)
        except Exception as error:
            reply = (False, failure(number, rank, error))
        send(connection, reply)


def listen(connection: Connection, commands: queue.SimpleQueue[Any]) -> None:
    """Queue commands as they come; end the process at once when the caller is gone, whatever else it is doing."""
    try:
        while True:
            commands.put(receive(connection))
    except (EOFError, OSError):
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
    store = dist.TCPStore(start.store_host, start.store_port, spec.world, is_master=False)
    init_process_group(start.backend, number, spec.world, device, start.timeout_seconds, store)
    return Rank(spec, tensors, ProcessGroupTransport(number, device, spec.edges, spec.shared))


def failure(number: int, rank: Rank | None, error: Exception) -> Failure:
    """What the caller is told about an exception."""
    action = rank.running.current if rank is not None and rank.running is not None else None
    return Failure(
        number,
        str(action) if action is not None else "",
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
        isinstance(error, TransportError | dist.DistError),
        error if isinstance(error, AutoparError) else None,
    )
