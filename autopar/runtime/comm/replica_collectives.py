"""Collectives of data-parallel replicas on flat buckets: by NCCL or Gloo, or by the GPUs' copy engines.

Copy engines take no multiprocessors from matrix products, so gradient and weight collectives run on a side stream while
the model computes. Prices count the exposed rest (`autopar.cost.ops.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.comm_sizes import MAX_SYMMETRIC_BUFFER_BYTES, replica_buffer_bytes
from autopar.runtime.comm.protocols import SendHandle, Transport
from autopar.runtime.comm.symmetric_collectives import SymmetricCommunicator
from autopar.runtime.params.flat_buckets import FlatBucket


class ReplicaCollectives:
    """Collectives of the replicas of one part of the weights: by copy engines with peer access, else by the transport.

    All replicas make the same calls in the same order, beginning with the constructor. The segments of a bucket are in
    the replicas' order. ``flat`` is a bucket's buffer, [bucket.numel]. Calling a handle waits for its collective.

    Copy engines write into peers' memory, overlapped with compute on a side stream. NCCL's kernels take multiprocessors
    away from matrix products, which then take longer by almost the time of the collective.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], device: torch.device, largest_bytes: int) -> None:
        """Reserve symmetric memory where all replicas have peer access.

        Args:
            ranks: replicas in order.
            device: of this rank.
            largest_bytes: size of the largest bucket, with all its segments as long as the longest.
        """
        self.transport, self.ranks, self.device = transport, tuple(ranks), device
        self.communicator: SymmetricCommunicator | None = None
        self.stream: torch.cuda.Stream | None = None
        buffer = transport.symmetric_buffer(ranks)
        if buffer is None:
            return
        buffer.reserve(replica_buffer_bytes(largest_bytes, len(ranks)))
        self.communicator = SymmetricCommunicator(self.ranks.index(transport.rank), len(ranks), buffer)
        # High priority: barriers and sums are little work, and other ranks wait for them.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def sum(self, flat: torch.Tensor) -> SendHandle:
        """Start an all-reduce in place."""
        if self.communicator is not None:
            parts = flat.split(MAX_SYMMETRIC_BUFFER_BYTES // flat.itemsize)
            return self.on_side_stream(self.communicator.sum_segments, parts)
        return self.transport.start_sum(flat, self.ranks)

    def reduce_scatter(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start a reduce-scatter in place: each replica gets the sum of its segment; the others are undefined then."""
        if self.communicator is not None:
            return self.on_side_stream(self.communicator.reduce_segments, self.parts(flat, bucket))
        if bucket.even:
            return self.transport.start_reduce_scatter(flat, self.ranks)
        return self.for_each_segment(self.transport.start_sum, flat, bucket)

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start an all-gather in place: each replica's segment goes to all replicas."""
        if self.communicator is not None:
            return self.on_side_stream(self.communicator.gather_segments, self.parts(flat, bucket))
        if bucket.even:
            return self.transport.start_all_gather(flat, self.ranks)
        return self.for_each_segment(self.transport.start_broadcast, flat, bucket)

    def for_each_segment(self, start: Callable[..., SendHandle], flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start one collective per non-empty segment, with the segment's replica as root."""
        segments = zip(bucket.segments(flat), self.ranks, strict=True)
        handles = [start(segment, self.ranks, root) for segment, root in segments if segment.numel()]

        def wait_all() -> None:
            for wait in handles:
                wait()

        return wait_all

    def parts(self, flat: torch.Tensor, bucket: FlatBucket) -> list[list[torch.Tensor]]:
        """The segments in parts that fit into the symmetric buffer."""
        segments = bucket.segments(flat)
        row = MAX_SYMMETRIC_BUFFER_BYTES // len(segments) // flat.itemsize
        starts = range(0, bucket.longest_segment, row)
        return [[segment[start : start + row] for segment in segments] for start in starts]

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
