"""Collectives of a mesh axis whose ranks read and write each other's memory over NVLink.

The symmetric buffers are reserved between steps, for the largest collective (`autopar.sharding.buffer_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.comm.protocols import SymmetricBuffer
from autopar.runtime.comm.symmetric_p2p import allocate

# Up to this size every rank reads all summands whole (one-shot): a second barrier would cost more than it saves.
ONE_SHOT_BYTES = 2**19
MIN_GROWTH = 1.5  # of a buffer that is too small


class SymmetricBufferPool:
    """Symmetric buffers of a group's GPUs, used in the current stream's order.

    Programs that are added later may need a larger buffer. Smaller buffers stay allocated, because captured steps use
    them. Each is at least `MIN_GROWTH` times the one before, so that all together take at most three times the last.
    """

    def __init__(self, rank: int, device: torch.device, group: Any) -> None:
        """Nothing is allocated yet.

        Args:
            rank: number of this process in the group.
            group: process group of the axis.
        """
        self.rank, self.device, self.group = rank, device, group
        self.allocations: list[tuple[Tensor, Any]] = []

    @property
    def num_bytes(self) -> int:
        return self.allocations[-1][0].numel() if self.allocations else 0

    def reserve(self, num_bytes: int) -> None:
        if self.allocations and num_bytes <= self.num_bytes:
            return
        # Allocation blocks the hosts until all meet, so no GPU may still wait inside an earlier collective.
        torch.cuda.synchronize(self.device)
        self.allocations.append(allocate(max(num_bytes, int(MIN_GROWTH * self.num_bytes)), self.device, self.group))

    @property
    def handle(self) -> Any:
        """Handle to the buffers of all ranks, and to their signals."""
        return self.allocations[-1][1]

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        return self.handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)

    def barrier(self) -> None:
        self.handle.barrier()


@dataclass(frozen=True)
class SymmetricCommunicator:
    """Communicator of one axis; this process is number ``rank`` of ``ranks``.

    Each rank copies its tensor into its own buffer, and peers read it there with multiprocessors: the fastest way.
    Overlapped collectives write into the peers' buffers with the copy engines instead. The barrier that ends a
    collective frees the buffers for the next one. Sums are in the ranks' order, so all ranks get the same bits.

    Buffers do not grow inside collectives: `autopar.sharding.buffer_sizes` computes what collectives need.
    """

    rank: int
    ranks: int
    buffer: SymmetricBuffer = field(repr=False)

    def reserve(self, num_bytes: int) -> None:
        self.buffer.reserve(num_bytes)

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        if overlapped or (self.ranks > 2 and tensor.nbytes > ONE_SHOT_BYTES):
            self.sum_segments(tensor.view(-1))
            return
        self.check_size("an all-reduce", tensor.nbytes)
        self.buffer_view(self.rank, tensor).copy_(tensor)
        self.buffer.barrier()
        sum_into(tensor, [self.buffer_view(k, tensor) for k in range(self.ranks)])
        self.buffer.barrier()

    def sum_segments(self, flat: Tensor, dtype: torch.dtype | None = None) -> None:
        """Two-shot all-reduce of ``flat`` in place: each rank sums one segment, the others read the sum.

        Args:
            dtype: of the sum, before it is rounded to that of ``flat``; the same by default.
        """
        segments = flat.tensor_split(self.ranks)
        buffers = self.push_rows("an all-reduce", segments, len(segments[0]))
        own = segments[self.rank]
        total = torch.empty_like(own, dtype=dtype)
        sum_into(total, self.summands(own, buffers[self.rank]))
        own.copy_(total)
        buffers[self.rank][self.rank, : len(own)].copy_(own)
        self.buffer.barrier()
        for k in self.peer_order():
            segments[k].copy_(buffers[k][k, : len(segments[k])])
        self.buffer.barrier()

    def reduce_segments(self, segments: Sequence[Tensor], total: Tensor | None = None, adds: bool = False) -> None:
        """Reduce-scatter: each rank sums its flat segment; segments may differ in length.

        Args:
            total: the sum goes there, by default in place. Its dtype is that of the sum.
            adds: whether the sum is added to ``total`` instead of overwriting it.
        """
        total = segments[self.rank] if total is None else total
        buffer = self.push_rows("a reduce-scatter", segments, max(map(len, segments)), itself=True)[self.rank]
        rows = buffer[:, : len(total)]
        if adds:
            total.add_(torch.sum(rows, 0, dtype=total.dtype))
        else:
            torch.sum(rows, 0, dtype=total.dtype, out=total)  # one kernel: each waits for free multiprocessors
        self.buffer.barrier()

    def gather_segments(self, segments: Sequence[Tensor]) -> None:
        """All-gather in place: fill each flat segment from its rank; the inverse."""
        own = segments[self.rank]
        buffer = self.push_rows("an all-gather", [own] * self.ranks, max(map(len, segments)))[self.rank]
        for k in self.peer_order():
            segments[k].copy_(buffer[k, : len(segments[k])])
        self.buffer.barrier()

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.check_size("an all-gather", tensor.nbytes)
        stacked = tensor.new_empty([self.ranks, *tensor.shape])
        self.buffer_view(self.rank, tensor).copy_(tensor)
        self.buffer.barrier()
        torch.stack([tensor if k == self.rank else self.buffer_view(k, tensor) for k in range(self.ranks)], out=stacked)
        self.buffer.barrier()
        return stacked

    def reduce_scatter(self, stacked: Tensor, overlapped: bool = False) -> Tensor:
        part = stacked.new_empty(stacked.shape[1:])
        if overlapped:
            flat = stacked.flatten(1)
            buffer = self.push_rows("a reduce-scatter", flat.unbind(), flat.shape[1])[self.rank]
            sum_into(part.view(-1), self.summands(flat[self.rank], buffer))
        else:
            sum_into(part, self.exchange_parts("a reduce-scatter", stacked))
        self.buffer.barrier()
        return part

    def all_to_all(self, stacked: Tensor) -> Tensor:
        received = torch.empty_like(stacked)
        torch.stack(self.exchange_parts("an all-to-all", stacked), out=received)
        self.buffer.barrier()
        return received

    def publish(self, tensor: Tensor) -> Tensor:
        buffer = self.push_rows("a linear layer's all-gather", [tensor.view(-1)] * self.ranks, tensor.numel())[
            self.rank
        ]
        return buffer.view(self.ranks, *tensor.shape)

    def unpublish(self) -> None:
        self.buffer.barrier()

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        self.check_size("a linear layer's reduce-scatter", stacked.nbytes)
        self.buffer_view(rank, stacked)[self.rank].copy_(stacked[rank])

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        self.buffer.barrier()
        buffer, part = self.buffer_view(self.rank, stacked), torch.empty_like(stacked[self.rank])
        sum_into(part, [stacked[k] if k == self.rank else buffer[k] for k in range(self.ranks)])
        self.buffer.barrier()
        return part

    def check_size(self, what: str, num_bytes: int) -> None:
        """Assert that a collective fits into the reserved buffer."""
        reserved = self.buffer.num_bytes
        assert num_bytes <= reserved, (
            f"{what} of {self.ranks} ranks takes {num_bytes:,} bytes of each rank's buffer, {reserved:,} were reserved"
        )

    def exchange_parts(self, what: str, stacked: Tensor) -> list[Tensor]:
        """Parts for this rank, one from each rank, read from the buffers in which ``stacked`` [ranks, *local] lies."""
        self.check_size(what, stacked.nbytes)
        buffer = self.buffer_view(self.rank, stacked)
        for some in (slice(self.rank), slice(self.rank + 1, self.ranks)):
            if len(stacked[some]):
                buffer[some].copy_(stacked[some])
        self.buffer.barrier()
        return [stacked[k] if k == self.rank else self.buffer_view(k, stacked)[self.rank] for k in range(self.ranks)]

    def push_rows(self, what: str, rows: Sequence[Tensor], longest: int, itself: bool = False) -> list[Tensor]:
        """Push one flat tensor to each peer's buffer, and with ``itself`` to this rank's own; then wait for all ranks.

        Returns:
            Buffer of each rank, [ranks, longest]: row k came from rank k.
        """
        dtype = rows[0].dtype
        self.check_size(what, self.ranks * longest * dtype.itemsize)
        buffers = [self.buffer.view(k, [self.ranks, longest], dtype) for k in range(self.ranks)]
        for k in (*self.peer_order(), self.rank) if itself else self.peer_order():
            buffers[k][self.rank, : len(rows[k])].copy_(rows[k])
        self.buffer.barrier()
        return buffers

    def summands(self, own: Tensor, buffer: Tensor) -> list[Tensor]:
        """Summands of a segment in the ranks' order: this rank's own one, and the rows of its buffer."""
        return [own if k == self.rank else buffer[k, : len(own)] for k in range(self.ranks)]

    def buffer_view(self, rank: int, like: Tensor) -> Tensor:
        return self.buffer.view(rank, like.shape, like.dtype)

    def peer_order(self) -> list[int]:
        """The other ranks, beginning after this one, so that no two ranks begin with the same peer."""
        return [(self.rank + k) % self.ranks for k in range(1, self.ranks)]


def sum_into(total: Tensor, summands: Sequence[Tensor]) -> None:
    """Write the sum into ``total``, added in this order; ``total`` is none of the summands."""
    first, second, *rest = summands
    if total.dtype == first.dtype:
        torch.add(first, second, out=total)
    else:  # torch.add would round to the dtype of the summands
        total.copy_(first)
        total.add_(second)
    for summand in rest:
        total.add_(summand)
