"""Boards of ranks that are threads: tensors of one process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from autopar.runtime.symmetric_axis import SymmetricCommunicator


class ThreadBoards:
    """A rank's view of what all threads share. Behind each barrier one of them is late, the others run ahead."""

    def __init__(self, rank: int, boards: torch.Tensor, waiting: threading.Barrier) -> None:
        self.rank, self.boards, self.waiting = rank, boards, waiting
        self.seed = random.Random(0)  # all ranks draw the same

    def reserve(self, num_bytes: int) -> None:
        assert num_bytes <= self.boards.shape[1]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.boards[rank, :size].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        self.waiting.wait(timeout=10)
        if self.seed.randrange(len(self.boards)) == self.rank:
            time.sleep(0.003)

    def spoil(self) -> None:
        """What a next collective may do once this rank is through with one: write anywhere."""
        self.boards.fill_(255)
        self.barrier()


def on_all(own: torch.Tensor, call: Callable[[SymmetricCommunicator, torch.Tensor], Any]) -> list[list[Any]]:
    """What each rank's calls return, by round.

    Args:
        own: what each rank calls with, of shape [rounds, ranks, ...].
    """
    ranks = own.shape[1]
    shared, waiting = torch.full([ranks, 4096], 255, dtype=torch.uint8), threading.Barrier(ranks)

    def rounds(rank: int) -> list[Any]:
        boards = ThreadBoards(rank, shared, waiting)
        member = SymmetricCommunicator(rank, ranks, boards)
        results = []
        for given in own[:, rank]:
            results.append(call(member, given))
            boards.spoil()
        return results

    with ThreadPoolExecutor(ranks) as pool:
        return [list(of_all) for of_all in zip(*pool.map(rounds, range(ranks)), strict=True)]
