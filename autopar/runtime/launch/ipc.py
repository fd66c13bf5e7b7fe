"""Messages between the caller and its worker processes: pickled structure, tensors through shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

import cloudpickle
import torch

from autopar.ir.units import of_type
from autopar.runtime.launch.shared_memory import SharedMemory, Slot


@dataclass(frozen=True)
class Message:
    """A message without its tensors. ``lent``: the receiver reads them where they are, before it replies."""

    structure: bytes
    slots: Sequence[Slot]
    borrowed: bool


class WorkerChannel:
    """One side of what connects the caller with a worker. Messages go either way; each waits for the reply to the last.

    Shared memory is given back as soon as a message is read, but for one that is lent: a step follows another.
    """

    def __init__(self, connection: Connection, sending: SharedMemory, receiving: SharedMemory) -> None:
        self.connection, self.sending, self.receiving = connection, sending, receiving

    def encode(self, message: Any, lend: bool = False) -> Message:
        """Anything that pickles; its tensors arrive on the CPU. Raises whatever pickling does, and OSError."""
        structure, tensors = serialize(message)
        return Message(structure, self.sending.write(tensors) if tensors else [], lend)

    def decode(self, encoded: Message) -> Any:
        """The message. Raises whatever the user's classes in it do."""
        tensors = self.receiving.read(encoded.slots)
        if tensors and not encoded.borrowed:
            tensors = [view.clone() for view in tensors]
            self.receiving.clear()
        return Unpickler(io.BytesIO(encoded.structure), tensors).load()

    def send(self, encoded: Message) -> None:
        """Send a message. Raises OSError when the other side is gone, and only then."""
        self.connection.send(encoded)

    def receive(self) -> Message:
        """The next message. Raises EOFError or OSError when the other side is gone, and only then."""
        return self.connection.recv()

    def close(self) -> None:
        """End it, on this side."""
        self.connection.close()
        self.sending.close()
        self.receiving.close()


class CodePickler(cloudpickle.Pickler):
    """Pickles functions with the file that they come from.

    cloudpickle leaves it out since 3.1.3, and a worker's traceback would not show the user's line.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        _, fields = self.dispatch_table[CodeType](obj)
        return code_of_file, (obj.co_filename, fields)


def code_of_file(filename: str, fields: tuple) -> CodeType:
    """A code object of a file, from the arguments of its constructor."""
    return CodeType(*fields).replace(co_filename=filename)


class Pickler(CodePickler):
    """Takes every tensor out of a message, wherever it is; each travels once, and of a slice only the slice."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []  # the very objects: an id is only unique while its object lives
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.is_meta or obj.is_quantized or obj.layout != torch.strided:
            raise pickle.PicklingError(f"it is a tensor of layout {obj.layout} on {obj.device}, dtype {obj.dtype}")
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self.numbers[id(obj)]


class Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]


def pickled(thing: Any) -> bytes:
    """A thing with its tensors and the user's functions, for `pickle.loads`. Raises whatever pickling does."""
    file = io.BytesIO()
    CodePickler(file).dump(thing)
    return file.getvalue()


def serialize(message: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Structure and tensors of a message. Raises whatever pickling does."""
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(message)
    return file.getvalue(), [tensor.detach() for tensor in pickler.tensors]


def find_unpicklable(thing: Any, name: str) -> str:
    """The innermost part of a thing that cannot be encoded, and its type: ``targets[0]['lock'], a lock``."""
    for label, part in parts(thing):
        try:
            serialize(part)
        except Exception:
            return find_unpicklable(part, name + label)
    return f"{name}, {of_type(thing)}"


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a container or dataclass holds, each with the text that leads to it."""
    if is_dataclass(thing) and not isinstance(thing, type):
        yield from ((f".{field.name}", getattr(thing, field.name)) for field in fields(thing))
    elif isinstance(thing, dict):
        yield from ((f"[{key!r}]", part) for key, part in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(thing))
