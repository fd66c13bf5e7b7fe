"""Collectives of data-parallel replicas on flat buckets: by NCCL or Gloo, or by the GPUs' copy engines.

Copy engines take no multiprocessors from matrix products, so gradient and weight collectives run on a side stream while
the model computes. Prices count the exposed rest (`autopar.cost.ops.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autopar.ir.comm_sizes import MAX_SYMMETRIC_BUFFER_BYTES, replica_buffer_bytes
from autopar.runtime.comm.protocols import SendHandle, Transport
from autopar.runtime.comm.symmetric_collectives import SymmetricCommunicator
from autopar.runtime.params.flat_buckets import FlatBucket


class ReplicaCollectives(Protocol):
    """Collectives of the replicas of one part of the weights.

    The segments of a bucket are in the replicas' order. All replicas make the same calls in the same order. ``flat`` is
    a bucket's buffer, [bucket.numel].
    """

    def sum(self, flat: torch.Tensor) -> SendHandle:
        """Start an all-reduce in place; calling the handle waits for it."""
        ...

    def reduce_scatter(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start a reduce-scatter in place: each replica gets the sum of its segment; the others are undefined then."""
        ...

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start an all-gather in place: each replica's segment goes to all replicas."""
        ...


def make_replica_collectives(
    transport: Transport, ranks: Sequence[int], device: torch.device, largest_bytes: int
) -> ReplicaCollectives:
    """The fastest collectives among some ranks: by copy engines with peer access, else by the transport. All call.

    Args:
        device: of this rank.
        largest_bytes: size of the largest bucket, with all its segments as long as the longest.
    """
    buffer = transport.symmetric_buffer(ranks)
    if buffer is None:
        return TransportReplicaCollectives(transport, ranks)
    buffer.reserve(replica_buffer_bytes(largest_bytes, len(ranks)))
    return SymmetricReplicaCollectives(
        SymmetricCommunicator([*ranks].index(transport.rank), len(ranks), buffer), device
    )


class TransportReplicaCollectives:
    """Collectives of the transport: one per bucket, or one per segment where segments differ in length."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.transport, self.ranks = transport, tuple(ranks)

    def sum(self, flat: torch.Tensor) -> SendHandle:
        return self.transport.start_sum(flat, self.ranks)

    def reduce_scatter(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        if bucket.even:
            return self.transport.start_reduce_scatter(flat, self.ranks)
        return wait_all([self.transport.start_sum(part, self.ranks, rank) for part, rank in self.parts(flat, bucket)])

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        if bucket.even:
            return self.transport.start_all_gather(flat, self.ranks)
        return wait_all(
            [self.transport.start_broadcast(part, self.ranks, rank) for part, rank in self.parts(flat, bucket)]
        )

    def parts(self, flat: torch.Tensor, bucket: FlatBucket) -> list[tuple[torch.Tensor, int]]:
        """Non-empty segments with their ranks."""
        parts = [(bucket.segment(flat, owner), rank) for owner, rank in enumerate(self.ranks)]
        return [(part, rank) for part, rank in parts if part.numel()]


class SymmetricReplicaCollectives:
    """Collectives by copy engines that write into peers' memory, overlapped with compute on a side stream.

    NCCL's kernels take multiprocessors away from matrix products, which then take longer by almost the time of the
    collective.
    """

    def __init__(self, communicator: SymmetricCommunicator, device: torch.device) -> None:
        self.communicator, self.device = communicator, device
        # High priority: barriers and sums are little work, and other ranks wait for them.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def sum(self, flat: torch.Tensor) -> SendHandle:
        return self.on_side_stream(
            self.communicator.sum_segments, flat.split(MAX_SYMMETRIC_BUFFER_BYTES // flat.itemsize)
        )

    def reduce_scatter(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        return self.on_side_stream(self.communicator.reduce_segments, self.parts(flat, bucket))

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        return self.on_side_stream(self.communicator.gather_segments, self.parts(flat, bucket))

    def parts(self, flat: torch.Tensor, bucket: FlatBucket) -> list[list[torch.Tensor]]:
        """Segments in parts that fit into the symmetric buffer."""
        ranks = self.communicator.ranks
        whole, row = (
            [bucket.segment(flat, k) for k in range(ranks)],
            MAX_SYMMETRIC_BUFFER_BYTES // ranks // flat.itemsize,
        )
        return [[segment[start : start + row] for segment in whole] for start in range(0, bucket.longest_segment, row)]

    def on_side_stream(self, run: Callable[[Any], None], parts: Sequence[Any]) -> SendHandle:
        """Start a collective of each part on the side stream, one after the other."""
        if self.stream is None:
            for part in parts:
                run(part)
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for part in parts:
                run(part)
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)


def wait_all(handles: Sequence[SendHandle]) -> SendHandle:
    """Handle that waits for all handles."""

    def handle() -> None:
        for wait in handles:
            wait()

    return handle
