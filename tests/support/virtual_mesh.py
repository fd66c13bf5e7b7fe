"""Ranks of several tensor axes as threads of this process, which meet in collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from autopar.ir.layout import AxisSizes
from autopar.ir.tensor_axes import axis_index
from autopar.ops import collectives

T = TypeVar("T")
TIMEOUT_SECONDS = 60


@dataclass
class Meeting:
    """The ranks of one axis that communicate with each other."""

    ranks: int
    tensors: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=TIMEOUT_SECONDS)

    def exchanged(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, in order."""
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        found = [self.tensors[r] for r in range(self.ranks)]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadCommunicator:
    """An axis as one of its ranks sees it."""

    rank: int
    meeting: Meeting

    @property
    def ranks(self) -> int:
        return self.meeting.ranks

    def reserve(self, num_bytes: int) -> None:
        """Nothing: threads share memory."""

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        tensor.copy_(torch.stack(self.meeting.exchanged(self.rank, tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchanged(self.rank, tensor))

    def reduce_scatter(self, stacked: Tensor, overlapped: bool = False) -> Tensor:
        return torch.stack([each[self.rank] for each in self.meeting.exchanged(self.rank, stacked)]).sum(0)

    def all_to_all(self, stacked: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self.meeting.exchanged(self.rank, stacked)])

    def peer_order(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def publish(self, tensor: Tensor) -> Tensor:
        return self.all_gather(tensor)

    def unpublish(self) -> None:
        """Nothing: a gathered tensor belongs to its receiver."""

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        """Nothing: all parts travel in `reduce_pushed`."""

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        return self.reduce_scatter(stacked)


def on_each_shard(sizes: AxisSizes, work: Callable[[int, dict[str, str]], T]) -> list[T]:
    """The results of ``work(shard, key of each axis)`` on all shards, which run at the same time."""
    meetings: dict[tuple, Meeting] = {}
    keys: list[dict[str, str]] = []
    for shard in range(prod(sizes.values())):
        index = axis_index(sizes, shard)
        keys.append({axis: f"{shard}.{axis}" for axis in sizes})
        for axis, size in sizes.items():
            others = (axis, *((a, i) for a, i in index.items() if a != axis))
            meeting = meetings.setdefault(others, Meeting(size))
            collectives.register(keys[shard][axis], ThreadCommunicator(index[axis], meeting))

    def alone(shard: int) -> T:
        try:
            return work(shard, keys[shard])
        except BaseException:
            for meeting in meetings.values():
                meeting.barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(len(keys)) as pool:
            futures = [pool.submit(alone, shard) for shard in range(len(keys))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # those of others are broken barriers
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]
    finally:
        for own in keys:
            for key in own.values():
                collectives.unregister(key)
