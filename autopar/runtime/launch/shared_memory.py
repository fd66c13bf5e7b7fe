"""Memory that two processes share, for the tensors of the messages from one to the other."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from autopar.ir.comm_sizes import round_up

ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies, in bytes from the start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SharedMemory:
    """A file without a name, in memory where the system has such files. It grows as it must.

    One side writes, the other reads; each must know when the other is done.
    """

    def __init__(self, fd: int) -> None:
        """Take an open file, which `close` gives back."""
        self.fd = fd
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Slot]:
        """Copy tensors of any device here, over what was here.

        Raises:
            OSError: there is no room.
        """
        slots, end = [], 0
        for tensor in tensors:
            slots.append(Slot(tensor.dtype, tuple(tensor.shape), end))
            end += round_up(tensor.nbytes, ALIGNMENT)
        if end > os.fstat(self.fd).st_size:
            allocate(self.fd, end)
        for view, tensor in zip(self.read(slots), tensors, strict=True):
            view.copy_(tensor)
        return slots

    def read(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Views of what was written last. The next writing changes them."""
        size = os.fstat(self.fd).st_size
        if size > len(self.bytes):
            self.bytes = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        return [self.bytes[s.offset : s.offset + s.num_bytes].view(s.dtype).view(s.shape) for s in slots]

    def clear(self) -> None:
        """Give the memory back: views are of no use any more."""
        os.ftruncate(self.fd, 0)
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Give the file back."""
        os.close(self.fd)


def shared_file() -> int:
    """An open file without a name, which processes that are started can inherit."""
    if sys.platform == "linux":
        return os.memfd_create("autopar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def allocate(fd: int, num_bytes: int) -> None:
    """Make a file so long, with room for all of it: memory that is only promised would end the process at first use.

    Raises:
        OSError: there is no room.
    """
    if sys.platform == "linux":
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.ftruncate(fd, num_bytes)
