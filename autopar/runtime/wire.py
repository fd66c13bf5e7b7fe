"""Messages between the caller and its worker processes: pickled structure, tensors as safetensors bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import cloudpickle
import torch
from safetensors.torch import load, save

Encoded: TypeAlias = tuple[bytes, bytes]  # structure, tensors


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


def encode(message: Any) -> Encoded:
    """Anything that pickles, as bytes; its tensors travel raw and arrive on the CPU. Raises whatever pickling does."""
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(message)
    return file.getvalue(), save(pickler.tensors)


def decode(encoded: Encoded) -> Any:
    """The message. Raises whatever the user's classes in it do."""
    structure, tensors = encoded
    return Unpickler(io.BytesIO(structure), load(tensors)).load()


def send(connection: Connection, encoded: Encoded) -> None:
    """Send a message. Raises OSError when the other side is gone, and only then."""
    for part in encoded:
        connection.send_bytes(part)


def receive(connection: Connection) -> Encoded:
    """The next message. Raises EOFError or OSError when the other side is gone, and only then."""
    return connection.recv_bytes(), connection.recv_bytes()


def culprit(thing: Any, name: str) -> str:
    """The innermost part of a thing that cannot be encoded, and its type: ``targets[0]['lock'], a lock``."""
    for label, part in parts(thing):
        try:
            encode(part)
        except Exception:
            return culprit(part, name + label)
    return f"{name}, a {type(thing).__name__}"


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a container or dataclass holds, each with the text that leads to it."""
    if is_dataclass(thing) and not isinstance(thing, type):
        yield from ((f".{field.name}", getattr(thing, field.name)) for field in fields(thing))
    elif isinstance(thing, dict):
        yield from ((f"[{key!r}]", part) for key, part in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(thing))
