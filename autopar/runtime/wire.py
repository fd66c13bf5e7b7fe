"""Messages between the caller and its worker processes: pickled structure, tensors as safetensors bytes."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from safetensors.torch import load, save


class Pickler(cloudpickle.Pickler):
    """Takes every tensor out of a message, wherever it is; each travels once, and of a slice only the slice."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self.kept: list[torch.Tensor] = []  # an id is only unique while its object lives

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self.names:
            self.kept.append(obj)
            self.names[id(obj)] = str(len(self.tensors))
            self.tensors[self.names[id(obj)]] = obj.detach().cpu().contiguous().clone()
        return self.names[id(obj)]


class Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, file: io.BytesIO, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: str) -> torch.Tensor:
        return self.tensors[pid]


def send(connection: Connection, message: Any) -> None:
    """Send anything that pickles; tensors travel as raw bytes and arrive on the CPU."""
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(message)
    connection.send_bytes(file.getvalue())
    connection.send_bytes(save(pickler.tensors))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError when the other side is gone."""
    structure = connection.recv_bytes()
    return Unpickler(io.BytesIO(structure), load(connection.recv_bytes())).load()
