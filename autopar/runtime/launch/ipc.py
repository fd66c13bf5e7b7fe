"""Messages between the caller and its workers: the structure is pickled, tensors travel through shared memory."""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

import cloudpickle
import torch
from torch import nn

from autopar.ir.units import of_type
from autopar.runtime.launch.shared_memory import SharedMemory, Slot


@dataclass(frozen=True)
class Message:
    """Message without its tensors. If ``borrowed``, the receiver reads them in shared memory, before it replies."""

    structure: bytes
    slots: Sequence[Slot]
    borrowed: bool


class WorkerChannel:
    """One end of the connection between the caller and a worker.

    Messages go both ways; each waits for the reply to the previous one. Shared memory is freed as soon as a message is
    read, except for a borrowed message: steps follow each other, and the next one uses the memory again.
    """

    def __init__(self, connection: Connection, sending: SharedMemory, receiving: SharedMemory) -> None:
        self.connection, self.sending, self.receiving = connection, sending, receiving

    def encode(self, message: Any, lend: bool = False) -> Message:
        """Message of a picklable object; its tensors arrive on the CPU. Raises what pickling raises, and OSError."""
        structure, tensors = serialize(message)
        return Message(structure, self.sending.write(tensors) if tensors else [], lend)

    def decode(self, encoded: Message) -> Any:
        """Object that was encoded. Raises what the user's classes in it raise."""
        tensors = self.receiving.read(encoded.slots)
        if tensors and not encoded.borrowed:
            tensors = [view.clone() for view in tensors]
            self.receiving.clear()
        return Unpickler(io.BytesIO(encoded.structure), tensors).load()

    def send(self, encoded: Message) -> None:
        """Send a message. Raises OSError if and only if the other process is gone."""
        self.connection.send(encoded)

    def tell(self, message: Any) -> None:
        """Send a last small message without waiting; to a process that is gone or does not receive, nothing is sent."""
        os.set_blocking(self.connection.fileno(), False)
        with suppress(OSError):
            self.send(self.encode(message))

    def receive(self) -> Message:
        """Next message. Raises EOFError or OSError if and only if the other process is gone."""
        return self.connection.recv()

    def close(self) -> None:
        """Close this end of the connection."""
        self.connection.close()
        self.sending.close()
        self.receiving.close()


def limit_waits(connection: Connection, seconds: float) -> None:
    """Let a send or a begun receive raise BlockingIOError after ``seconds``: a stopped process reads and sends nothing.

    Args:
        connection: one end of a `multiprocessing.Pipe` that goes both ways.
    """
    limit = struct.pack("ll", max(1, int(seconds)), 0)  # timeval
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class CodePickler(cloudpickle.Pickler):
    """Pickles functions together with the names of their source files, and tensors of GPUs as tensors on the CPU.

    cloudpickle omits the file name since 3.1.3; then a worker's traceback does not show the user's line. A tensor would
    arrive on the caller's GPU, in each worker.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            on_cpu = obj.detach().cpu()
            on_cpu = nn.Parameter(on_cpu, obj.requires_grad) if isinstance(obj, nn.Parameter) else on_cpu
            return on_cpu.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        reduced = self.dispatch_table[CodeType](obj)
        return code_of_file, (obj.co_filename, reduced[1])


def code_of_file(filename: str, fields: tuple[Any, ...]) -> CodeType:
    """Code object of a source file, from the arguments of its constructor."""
    return CodeType(*fields).replace(co_filename=filename)


class Pickler(CodePickler):
    """Takes all tensors out of a message. Each tensor travels once; a slice travels without the rest of its storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []  # keeps the tensors alive: an id is unique only while its object lives
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
    """Puts the tensors back into the message."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]


def pickled(thing: Any) -> bytes:
    """Pickle of an object, with its tensors and the user's functions. Raises what pickling raises."""
    file = io.BytesIO()
    CodePickler(file).dump(thing)
    return file.getvalue()


def serialize(message: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Structure and tensors of a message. Raises what pickling raises."""
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(message)
    return file.getvalue(), [tensor.detach() for tensor in pickler.tensors]


def find_unpicklable(thing: Any, name: str) -> str:
    """Innermost part of an object that cannot be encoded, and its type: ``targets[0]['lock'], a lock``."""
    for label, part in parts(thing):
        try:
            serialize(part)
        except Exception:
            return find_unpicklable(part, name + label)
    return f"{name}, {of_type(thing)}"


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Items of a container or fields of a dataclass, each with its subscript or field name as text."""
    if is_dataclass(thing) and not isinstance(thing, type):
        yield from ((f".{field.name}", getattr(thing, field.name)) for field in fields(thing))
    elif isinstance(thing, dict):
        yield from ((f"[{key!r}]", part) for key, part in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(thing))
