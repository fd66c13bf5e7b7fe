"""Memory that two processes share, for the tensors in messages from one process to the other."""

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
    """Place of a tensor in shared memory; ``offset`` in bytes from the start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SharedMemory:
    """File without a name, in memory if the system has such files. It grows with the tensors.

    One process writes and the other reads; each must know when the other has finished.
    """

    def __init__(self, fd: int) -> None:
        """Take over an open file, which `close` closes."""
        self.fd = fd
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Slot]:
        """Copy tensors of any device into the file, over its previous content.

        Raises:
            OSError: there is not enough memory.
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
        """Views of the tensors that were written last, on the CPU. The next `write` changes them."""
        size = os.fstat(self.fd).st_size
        if size > len(self.bytes):
            self.bytes = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        return [self.bytes[s.offset : s.offset + s.num_bytes].view(s.dtype).view(s.shape) for s in slots]

    def clear(self) -> None:
        """Free the memory. Views from `read` must not be used afterwards."""
        os.ftruncate(self.fd, 0)
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def shared_file() -> int:
    """Open file without a name, which started processes can inherit."""
    if sys.platform == "linux":
        return os.memfd_create("autopar")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def allocate(fd: int, num_bytes: int) -> None:
    """Extend a file to ``num_bytes`` and reserve the memory. Without that, use of missing memory ends the process.

    Raises:
        OSError: there is not enough memory.
    """
    if sys.platform == "linux":
        os.posix_fallocate(fd, 0, num_bytes)
    else:
        os.ftruncate(fd, num_bytes)
