"""Symmetric buffers of ranks that are threads: rows of one tensor."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from autopar.runtime.comm.symmetric_collectives import SymmetricCommunicator


class ThreadBuffers:
    """One rank's view of the buffers of all threads. After each barrier one thread, drawn at random, is late.

    Attributes:
        num_bytes: most bytes that were reserved.
        taken: most bytes that one view had.
    """

    def __init__(
        self, rank: int, buffers: torch.Tensor, waiting: threading.Barrier, late_seconds: float = 0.003
    ) -> None:
        self.rank, self.buffers, self.waiting, self.late_seconds = rank, buffers, waiting, late_seconds
        self.seed = random.Random(0)  # equal on all ranks
        self.num_bytes = self.taken = 0

    def reserve(self, num_bytes: int) -> None:
        assert num_bytes <= self.buffers.shape[1]
        self.num_bytes = max(self.num_bytes, num_bytes)

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        self.taken = max(self.taken, offset + size)
        return self.buffers[rank, offset : offset + size].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        self.waiting.wait(timeout=30)
        if self.late_seconds and self.seed.randrange(len(self.buffers)) == self.rank:
            time.sleep(self.late_seconds)

    def spoil(self) -> None:
        """Overwrite all buffers, as the next collective may once this rank has finished one."""
        self.buffers.fill_(255)
        self.barrier()


def thread_buffers(ranks: int, capacity: int, late_seconds: float = 0.003) -> list[ThreadBuffers]:
    """View of each rank of new buffers of ``capacity`` bytes."""
    shared, waiting = torch.full([ranks, capacity], 255, dtype=torch.uint8), threading.Barrier(ranks)
    return [ThreadBuffers(rank, shared, waiting, late_seconds) for rank in range(ranks)]


def on_all(own: torch.Tensor, call: Callable[[SymmetricCommunicator, torch.Tensor], Any]) -> list[list[Any]]:
    """Results of a collective, [rounds][ranks].

    Args:
        own: argument of each rank in each round, [rounds, ranks, ...].
    """
    ranks, capacity = own.shape[1], 4096

    def rounds(buffers: ThreadBuffers) -> list[Any]:
        buffers.reserve(capacity)
        member = SymmetricCommunicator(buffers.rank, ranks, buffers)
        results = []
        for given in own[:, buffers.rank]:
            results.append(call(member, given))
            buffers.spoil()
        return results

    with ThreadPoolExecutor(ranks) as pool:
        return [list(of_all) for of_all in zip(*pool.map(rounds, thread_buffers(ranks, capacity)), strict=True)]
