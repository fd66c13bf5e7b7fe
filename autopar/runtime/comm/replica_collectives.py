"""Collectives of data-parallel replicas on flat buckets: by NCCL or Gloo, or by the GPUs' copy engines.

Copy engines take no multiprocessors from matrix products, so gradient and weight collectives run on a side stream while
the model computes. Prices count the exposed rest (`autopar.cost.ops.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from autopar.ir.comm_sizes import MAX_SYMMETRIC_BUFFER_BYTES, message_bytes, replica_buffer_bytes
from autopar.ir.grad_buckets import NUM_GRAD_SLOTS
from autopar.ir.plan_parts import ReduceDtype
from autopar.runtime.comm.protocols import SendHandle, SymmetricBuffer, Transport
from autopar.runtime.comm.symmetric_collectives import SymmetricCommunicator
from autopar.runtime.params.flat_buckets import FlatBucket


class ReduceBuffers:
    """Buffers that buckets take turns in, so that their number does not grow with that of the buckets."""

    def __init__(self, dtype: torch.dtype, numel: int, count: int, device: torch.device) -> None:
        """Allocate ``count`` buffers of ``numel`` elements."""
        self.dtype = dtype
        self.buffers = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        self.pending: list[SendHandle | None] = [None] * count
        self.turn = 0

    def narrows(self, flat: torch.Tensor) -> bool:
        """Whether a tensor travels in another dtype than its own."""
        return flat.itemsize > self.dtype.itemsize

    def copy_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy of ``flat`` [numel], rounded, in the buffer that is next; waits for that one's earlier reduction."""
        self.turn = (self.turn + 1) % len(self.buffers)
        self.finish(self.turn)
        copy = self.buffers[self.turn][: flat.numel()]
        copy.copy_(flat)
        return copy

    def track(self, handle: SendHandle) -> SendHandle:
        """Handle of the reduction of the last copy, which the buffer's next user may have to wait for first."""
        turn = self.turn
        self.pending[turn] = handle

        def wait() -> None:
            if self.pending[turn] is handle:
                self.finish(turn)

        return wait

    def finish(self, turn: int) -> None:
        """Wait for the reduction of a buffer, if one is pending."""
        handle, self.pending[turn] = self.pending[turn], None
        if handle is not None:
            handle()

    def abandon(self) -> None:
        """Forget the reductions of a step that raised."""
        self.pending = [None] * len(self.buffers)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def reduce_buffers(buckets: Sequence[FlatBucket], dtype: ReduceDtype, device: torch.device) -> ReduceBuffers | None:
    """Buffers for the gradients of buckets, or None if all travel in the dtype of their main grads."""
    if dtype == "float32":
        return None
    torch_dtype = getattr(torch, dtype)
    narrowed = [bucket.numel for bucket in buckets if bucket.dtype.itemsize > torch_dtype.itemsize]
    return ReduceBuffers(torch_dtype, max(narrowed), min(NUM_GRAD_SLOTS, len(narrowed)), device) if narrowed else None


class ReplicaCollectives:
    """Collectives of the replicas of one part of the weights: by copy engines with peer access, else by the transport.

    All replicas make the same calls in the same order, beginning with the constructor. The segments of a bucket are in
    the replicas' order. ``flat`` is a bucket's buffer, [bucket.numel]. Calling a handle waits for its collective.

    Copy engines write into peers' memory, overlapped with compute on a side stream. NCCL's kernels take multiprocessors
    away from matrix products, which then take longer by almost the time of the collective.

    With ``buffers`` gradients travel in their dtype. On peers gradients are added in the dtype of the sum, and a sum
    that travels back is rounded once more. NCCL and Gloo add in the dtype of the buffers, and round every partial sum.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        device: torch.device,
        largest_bytes: int,
        buffers: ReduceBuffers | None = None,
        copies: Sequence[int] = (),
    ) -> None:
        """Reserve symmetric memory where all replicas have peer access.

        Args:
            ranks: replicas in order: all, or those that divide what ZeRO says.
            copies: replicas that update the same part of the weights as this one.
            device: of this rank.
            largest_bytes: size of the largest bucket as it travels, with all its segments as long as the longest.
            buffers: for gradients that travel in another dtype than their own.
        """
        self.transport, self.ranks, self.device = transport, tuple(ranks), device
        self.copies = tuple(copies)
        self.position = self.ranks.index(transport.rank)
        self.buffers = buffers
        self.communicator: SymmetricCommunicator | None = None
        buffer = transport.symmetric_buffer(ranks) if len(self.ranks) > 1 else None
        # High priority: barriers and sums are little work, and other ranks wait for them.
        has_stream = device.type == "cuda" and (len(self.copies) > 1 or buffer is not None)
        self.stream = torch.cuda.Stream(device, priority=-1) if has_stream else None
        if buffer is None:
            return
        buffer.reserve(replica_buffer_bytes(largest_bytes, len(ranks)))
        self.communicator = SymmetricCommunicator(self.position, len(ranks), buffer)

    def share(self, sizes: Sequence[int]) -> SharedSegments | None:
        """Memory for a segment of each of these sizes in bytes, which all replicas read; None without peer access."""
        buffer = self.transport.symmetric_buffer(self.ranks) if self.communicator is not None and sizes else None
        return (
            SharedSegments(buffer, self.position, len(self.ranks), sizes, self.device) if buffer is not None else None
        )

    def sum(self, flat: torch.Tensor) -> SendHandle:
        """Start an all-reduce in place."""
        sent = self.in_reduce_dtype(flat)
        if (communicator := self.communicator) is not None:
            parts = sent.split(MAX_SYMMETRIC_BUFFER_BYTES // sent.itemsize)
            wait = self.on_side_stream([partial(communicator.sum_segments, part, flat.dtype) for part in parts])
        else:
            wait = self.transport.start_sum(sent, self.ranks)
        return wait if sent is flat else self.tracked(moved(wait, sent, flat))

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        bucket: FlatBucket,
        total: torch.Tensor | None = None,
        adds: bool = False,
        over_copies: bool = True,
    ) -> SendHandle:
        """Start a reduce-scatter: each replica gets the sum of its segment. ``flat`` is undefined then.

        Args:
            total: the sum goes there, [segment]; by default into this replica's segment of ``flat``.
            adds: whether the sum is added to ``total`` instead of overwriting it.
            over_copies: whether ``total`` is then summed over the replicas that update the same part.
        """
        sent = self.in_reduce_dtype(flat)
        own = bucket.segments(sent)[self.position]
        if total is None:
            total = own if sent is flat else bucket.segments(flat)[self.position]
        if (communicator := self.communicator) is not None:
            pairs = zip(self.parts(sent, bucket), self.pieces(total, sent, bucket), strict=True)
            wait = self.on_side_stream([partial(communicator.reduce_segments, *pair, adds) for pair in pairs])
        else:
            if bucket.even:
                wait = self.transport.start_reduce_scatter(sent, self.ranks)
            else:
                wait = self.for_each_segment(self.transport.start_sum, sent, bucket)
            wait = wait if total is own else moved(wait, own, total, adds)
        wait = wait if sent is flat else self.tracked(wait)
        return self.sum_over_copies(total, wait) if over_copies else wait

    def sum_over_copies(self, total: torch.Tensor, ready: SendHandle = lambda: None) -> SendHandle:
        """Start an all-reduce of a part over the replicas that update it, once ``ready`` has been waited for."""
        if len(self.copies) < 2:
            return ready

        def add() -> None:
            ready()
            self.transport.start_sum(total, self.copies)()

        return self.on_side_stream([add]) if self.stream is not None else add

    def in_reduce_dtype(self, flat: torch.Tensor) -> torch.Tensor:
        """Gradients as they travel: ``flat`` itself, or a copy in the dtype of the buffers."""
        return self.buffers.copy_of(flat) if self.buffers is not None and self.buffers.narrows(flat) else flat

    def tracked(self, wait: SendHandle) -> SendHandle:
        """Handle of a collective on the copy that `in_reduce_dtype` made last."""
        assert self.buffers is not None
        return self.buffers.track(wait)

    def abandon(self) -> None:
        """Forget the collectives of a step that raised."""
        if self.buffers is not None:
            self.buffers.abandon()

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
        return run_on(self.stream, self.device, calls)


class SharedSegments:
    """Segments of all replicas, which copy engines of each replica read from its peers, without a rendezvous.

    Between two `synchronize` a segment does not change.
    """

    def __init__(
        self, buffer: SymmetricBuffer, position: int, ranks: int, sizes: Sequence[int], device: torch.device
    ) -> None:
        """Allocate; all replicas call with equal sizes, the largest of each segment in bytes."""
        self.buffer, self.position, self.ranks, self.device = buffer, position, ranks, device
        self.offsets = [0, *accumulate(message_bytes(size) for size in sizes)]
        buffer.reserve(self.offsets[-1])
        # Apart from that of the reductions, whose barriers wait for other replicas.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def own(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This replica's segment, [numel]."""
        return self.buffer.view(self.position, [numel], dtype, self.offsets[number])

    def start_gather(self, number: int, segments: Sequence[torch.Tensor]) -> SendHandle:
        """Start to fill segments, in the replicas' order; calling the handle waits."""
        order = [(self.position + k) % self.ranks for k in range(self.ranks)]
        return run_on(self.stream, self.device, [partial(self.read, number, k, segments[k]) for k in order])

    def read(self, number: int, rank: int, segment: torch.Tensor) -> None:
        segment.copy_(self.buffer.view(rank, segment.shape, segment.dtype, self.offsets[number]))

    def synchronize(self) -> None:
        """Wait until all replicas have finished their earlier reads and writes."""
        self.buffer.barrier()


def run_on(stream: torch.cuda.Stream | None, device: torch.device, calls: Sequence[Callable[[], None]]) -> SendHandle:
    """Run calls one after the other on a stream, after what the current one has been given; without one, now.

    Calling the handle has the current stream wait.
    """
    if stream is None:
        for call in calls:
            call()
        return lambda: None
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        done = stream.record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(done)


def moved(wait: SendHandle, source: torch.Tensor, total: torch.Tensor, adds: bool = False) -> SendHandle:
    """Handle that waits for ``source``, and copies it into ``total`` or adds it."""

    def wait_and_move() -> None:
        wait()
        total.add_(source) if adds else total.copy_(source)

    return wait_and_move
