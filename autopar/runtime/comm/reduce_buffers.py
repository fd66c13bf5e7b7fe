"""Flat buffers in which gradients travel between replicas in a narrower dtype than that of their main grads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.grad_buckets import NUM_GRAD_SLOTS
from autopar.ir.plan_parts import ReduceDtype
from autopar.runtime.comm.protocols import SendHandle
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
