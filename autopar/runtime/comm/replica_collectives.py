"""Flat buckets summed over replicas and shared out among them: by collectives, or by the GPUs' copy engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autopar.ir.comm_sizes import MAX_SYMMETRIC_BUFFER_BYTES, exchange_bytes
from autopar.runtime.comm.protocols import SendHandle, Transport
from autopar.runtime.comm.symmetric_collectives import SymmetricCommunicator
from autopar.runtime.params.flat_buckets import FlatBucket


class ReplicaCollectives(Protocol):
    """Replicas of the same weights, in whose order the segments of a bucket are. All of them make the same calls in the
    same order; ``flat`` is a bucket's buffer."""

    def sum(self, flat: torch.Tensor) -> SendHandle:
        """Start summing a buffer in place, on all replicas; calling the delivery waits for it."""
        ...

    def reduce_scatter(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start giving each replica the sum of its segment, in place; the others are left with anything."""
        ...

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start filling the buffer on all replicas with the segment that each of them has in it; the inverse."""
        ...


def make_replica_collectives(
    transport: Transport, ranks: Sequence[int], device: torch.device, largest_bytes: int
) -> ReplicaCollectives:
    """The fastest one there is among some ranks, all of which call.

    Args:
        device: this rank's.
        largest_bytes: of a bucket, all segments counted as long as its longest.
    """
    buffer = transport.symmetric_buffer(ranks)
    if buffer is None:
        return TransportReplicaCollectives(transport, ranks)
    buffer.reserve(exchange_bytes(largest_bytes, len(ranks)))
    return SymmetricReplicaCollectives(
        SymmetricCommunicator([*ranks].index(transport.rank), len(ranks), buffer), device
    )


class TransportReplicaCollectives:
    """By the transport's collectives: one for a bucket, or where segments differ in length one for each."""

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
        """Segments that are not empty, and their ranks."""
        parts = [(bucket.segment(flat, owner), rank) for owner, rank in enumerate(self.ranks)]
        return [(part, rank) for part, rank in parts if part.numel()]


class SymmetricReplicaCollectives:
    """By copy engines that write into the other GPUs' memory, beside whatever the multiprocessors compute.

    NCCL's kernels take multiprocessors away from matrix products, which then last longer by almost as much as the
    exchange does.
    """

    def __init__(self, communicator: SymmetricCommunicator, device: torch.device) -> None:
        self.communicator, self.device = communicator, device
        # First in line for multiprocessors: barriers and sums are little work, and others wait for them.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def sum(self, flat: torch.Tensor) -> SendHandle:
        return self.on_side_stream(
            self.communicator.sum_segments, flat.split(MAX_SYMMETRIC_BUFFER_BYTES // flat.itemsize)
        )

    def reduce_scatter(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        return self.on_side_stream(self.communicator.reduce_segments, self.pieces(flat, bucket))

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        return self.on_side_stream(self.communicator.gather_segments, self.pieces(flat, bucket))

    def pieces(self, flat: torch.Tensor, bucket: FlatBucket) -> list[list[torch.Tensor]]:
        """The segments, as much of each at a time as fits the boards."""
        ranks = self.communicator.ranks
        whole, row = (
            [bucket.segment(flat, k) for k in range(ranks)],
            MAX_SYMMETRIC_BUFFER_BYTES // ranks // flat.itemsize,
        )
        return [[segment[start : start + row] for segment in whole] for start in range(0, bucket.longest_segment, row)]

    def on_side_stream(self, run: Callable[[Any], None], pieces: Sequence[Any]) -> SendHandle:
        """Start exchanging pieces, one after the other."""
        if self.stream is None:
            for piece in pieces:
                run(piece)
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for piece in pieces:
                run(piece)
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)


def wait_all(deliveries: Sequence[SendHandle]) -> SendHandle:
    """Waits for all."""

    def delivery() -> None:
        for one in deliveries:
            one()

    return delivery
