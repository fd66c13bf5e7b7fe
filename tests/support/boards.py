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


class ThreadBoards:
    """One rank's view of the buffers of all threads. After each barrier one thread, drawn at random, is late.

    Attributes:
        num_bytes: most bytes that were reserved.
        taken: most bytes that one view had.
    """

    def __init__(
        self, rank: int, boards: torch.Tensor, waiting: threading.Barrier, late_seconds: float = 0.003
    ) -> None:
        self.rank, self.boards, self.waiting, self.late_seconds = rank, boards, waiting, late_seconds
        self.seed = random.Random(0)  # equal on all ranks
        self.num_bytes = self.taken = 0

    def reserve(self, num_bytes: int) -> None:
        assert num_bytes <= self.boards.shape[1]
        self.num_bytes = max(self.num_bytes, num_bytes)

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        self.taken = max(self.taken, size)
        return self.boards[rank, :size].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        self.waiting.wait(timeout=30)
        if self.late_seconds and self.seed.randrange(len(self.boards)) == self.rank:
            time.sleep(self.late_seconds)

    def spoil(self) -> None:
        """Overwrite all buffers, as the next collective may once this rank has finished one."""
        self.boards.fill_(255)
        self.barrier()


def thread_boards(ranks: int, capacity: int, late_seconds: float = 0.003) -> list[ThreadBoards]:
    """View of each rank of new buffers of ``capacity`` bytes."""
    shared, waiting = torch.full([ranks, capacity], 255, dtype=torch.uint8), threading.Barrier(ranks)
    return [ThreadBoards(rank, shared, waiting, late_seconds) for rank in range(ranks)]


def on_all(own: torch.Tensor, call: Callable[[SymmetricCommunicator, torch.Tensor], Any]) -> list[list[Any]]:
    """Results of a collective, [rounds][ranks].

    Args:
        own: argument of each rank in each round, [rounds, ranks, ...].
    """
    ranks, capacity = own.shape[1], 4096

    def rounds(boards: ThreadBoards) -> list[Any]:
        boards.reserve(capacity)
        member = SymmetricCommunicator(boards.rank, ranks, boards)
        results = []
        for given in own[:, boards.rank]:
            results.append(call(member, given))
            boards.spoil()
        return results

    with ThreadPoolExecutor(ranks) as pool:
        return [list(of_all) for of_all in zip(*pool.map(rounds, thread_boards(ranks, capacity)), strict=True)]
