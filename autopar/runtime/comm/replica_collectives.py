"""Collectives of data-parallel replicas on flat buckets: by NCCL or Gloo, or by the GPUs' copy engines.

Copy engines take no multiprocessors from matrix products, so gradient and weight collectives run on a side stream while
the model computes. Prices count the exposed rest (`autopar.cost.ops.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
        self.position = self.ranks.index(transport.rank)
        self.communicator: SymmetricCommunicator | None = None
        self.stream: torch.cuda.Stream | None = None
        buffer = transport.symmetric_buffer(ranks)
        if buffer is None:
            return
        buffer.reserve(replica_buffer_bytes(largest_bytes, len(ranks)))
        self.communicator = SymmetricCommunicator(self.position, len(ranks), buffer)
        # High priority: barriers and sums are little work, and other ranks wait for them.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def sum(self, flat: torch.Tensor) -> SendHandle:
        """Start an all-reduce in place."""
        if (communicator := self.communicator) is not None:
            parts = flat.split(MAX_SYMMETRIC_BUFFER_BYTES // flat.itemsize)
            return self.on_side_stream([partial(communicator.sum_segments, part) for part in parts])
        return self.transport.start_sum(flat, self.ranks)

    def reduce_scatter(
        self, flat: torch.Tensor, bucket: FlatBucket, total: torch.Tensor | None = None, adds: bool = False
    ) -> SendHandle:
        """Start a reduce-scatter: each replica gets the sum of its segment. ``flat`` is undefined then.

        Args:
            total: the sum goes there, [segment]; by default into this replica's segment of ``flat``.
            adds: whether the sum is added to ``total`` instead of overwriting it.
        """
        own = bucket.segments(flat)[self.position]
        into = own if total is None else total
        if (communicator := self.communicator) is not None:
            totals = self.pieces(into, flat, bucket)
            calls = [
                partial(communicator.reduce_segments, part, piece, adds)
                for part, piece in zip(self.parts(flat, bucket), totals, strict=True)
            ]
            return self.on_side_stream(calls)
        if bucket.even:
            wait = self.transport.start_reduce_scatter(flat, self.ranks)
        else:
            wait = self.for_each_segment(self.transport.start_sum, flat, bucket)
        if into is own:
            return wait

        def wait_and_move() -> None:
            wait()
            into.add_(own) if adds else into.copy_(own)

        return wait_and_move

    def all_gather(self, flat: torch.Tensor, bucket: FlatBucket) -> SendHandle:
        """Start an all-gather in place: each replica's segment goes to all replicas."""
        if (communicator := self.communicator) is not None:
            parts = self.parts(flat, bucket)
            return self.on_side_stream([partial(communicator.gather_segments, part) for part in parts])
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
        pieces = [self.pieces(segment, flat, bucket) for segment in bucket.segments(flat)]
        return [list(part) for part in zip(*pieces, strict=True)]

    def pieces(self, segment: torch.Tensor, flat: torch.Tensor, bucket: FlatBucket) -> list[torch.Tensor]:
        """A segment's piece of each of the `parts` of ``flat``; empty ones after its end."""
        row = MAX_SYMMETRIC_BUFFER_BYTES // bucket.num_segments // flat.itemsize
        return [segment[start : start + row] for start in range(0, bucket.longest_segment, row)]

    def on_side_stream(self, calls: Sequence[Callable[[], None]]) -> SendHandle:
        """Start collectives on the side stream, one after the other."""
        if self.stream is None:
            for call in calls:
                call()
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)
