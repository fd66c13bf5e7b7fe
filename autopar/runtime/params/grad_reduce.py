"""Reduction of gradients over ranks in flat buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from autopar.ir.grad_buckets import group_weights
from autopar.ir.graph import Weight
from autopar.runtime.comm.protocols import FlagChannel, SendHandle, Transport
from autopar.runtime.comm.replica_collectives import ReplicaCollectives
from autopar.runtime.params.flat_buckets import view_like
from autopar.runtime.params.grad_buffer import GradBuffer
from autopar.sharding.tensors import memory_order


class GradReducer:
    """Sums a rank's gradients over the replicas once a step: on all of them, or each on the replica that owns it.

    In the last backwards, which `enable_sync` announces, the reduction of a bucket starts as soon as its gradients are
    complete, and overlaps with the rest of the backward. The other buckets start in `flush_remaining`. All ranks start
    the same buckets in the same order, even if a rank lacks some gradients. A missing gradient counts as zeros, and
    stays missing if it is missing on every replica.
    """

    def __init__(
        self,
        grad_buffer: GradBuffer,
        updated: Mapping[str, nn.Parameter],
        ranks: Sequence[int],
        replica: int,
        flags: FlagChannel,
        collectives: ReplicaCollectives,
    ) -> None:
        """Reduce main grads over ``ranks``, all replicas; this one's segment of buckets is number ``replica``.

        Args:
            updated: what an optimizer updates, by name of the weight; gets the summed gradients.
        """
        self.grad_buffer, self.updated, self.ranks, self.replica = grad_buffer, updated, tuple(ranks), replica
        self.flags, self.collectives = flags, collectives
        self.reset()
        grad_buffer.on_accumulated = self.start_ready_buckets

    def reset(self) -> None:
        self.grad_buffer.flush_eagerly = False
        self.collectives.abandon()
        self.missing = [set(bucket.names) for bucket in self.grad_buffer.buckets]
        self.complete: set[str] = set()
        self.started: list[SendHandle] = []

    def set_used_params(self, names: Collection[str]) -> None:
        """Before the update, backwards reach only these weights: no bucket waits for others."""
        for missing in self.missing:
            missing &= {*names}

    def enable_sync(self, names: Collection[str]) -> None:
        """The next gradients of these weights are their last before the update: they complete their buckets."""
        self.grad_buffer.flush_eagerly = True
        self.complete |= {*names}

    def start_ready_buckets(self, names: Sequence[str]) -> None:
        """Note complete gradients, and start every complete bucket, in order."""
        for name in names:
            if name in self.complete:
                self.missing[self.grad_buffer.bucket_of[name]].discard(name)
        while len(self.started) < len(self.missing) and not self.missing[len(self.started)]:
            self.start(len(self.started))

    def start(self, index: int) -> None:
        """Start the reduction of a bucket, in place."""
        bucket, flat = self.grad_buffer.buckets[index], self.grad_buffer.with_zeros_for_missing(index)
        is_replicated = bucket.num_segments == 1
        self.started.append(
            self.collectives.sum(flat) if is_replicated else self.collectives.reduce_scatter(flat, bucket)
        )

    def flush_remaining(self) -> None:
        """After the last backward: start the buckets that wait for missing gradients.

        This precedes all other collectives, so that all replicas call in one order.
        """
        self.grad_buffer.absorb_param_grads()
        while len(self.started) < len(self.missing):
            self.start(len(self.started))

    def finish(self) -> None:
        """Finish, and attach the summed gradients to what the optimizer updates."""
        grads = self.grad_buffer
        self.flush_remaining()
        present = [name in grads.accumulated for name in grads.bucket_of]
        counts = self.flags.sum_flags(present, self.ranks)
        exists = dict(zip(grads.bucket_of, counts, strict=True))
        for wait in self.started:
            wait()
        grads.detach_from_params()
        grads.accumulated = {
            name
            for bucket in grads.buckets
            for name in (bucket.names if bucket.num_segments == 1 else bucket.pieces(self.replica))
            if exists[name]
        }
        grads.attach_to_params(self.updated)
        self.reset()


def sum_gradients(
    weights: Sequence[Weight], parameters: Mapping[str, nn.Parameter], ranks: Sequence[int], transport: Transport
) -> None:
    """Replace the gradient of each weight by its sum over the ranks; all weights have a gradient on all ranks."""
    started = []
    for group in group_weights(weights, 1):
        members = [parameters[weight.name] for weight in group]
        gradients = [p.grad for p in members if p.grad is not None]
        assert len(gradients) == len(members), f"no gradient: {[weight.name for weight in group]}"
        flat = packed(gradients, members)
        started.append((members, flat, transport.start_sum(flat, ranks)))
    for members, flat, wait in started:
        wait()
        for parameter, gradient in zip(members, unpacked(flat, members), strict=True):
            parameter.grad = gradient


def packed(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat tensor [elements of all tensors], each tensor in the memory order of its counterpart in ``like``.

    A single tensor that is in that order already is not copied.
    """
    flat = [t.permute(memory_order(model)).reshape(-1) for t, model in zip(tensors, like, strict=True)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``flat`` [elements of all] with the shapes and memory orders of ``like``; the inverse of `packed`."""
    pieces = flat.split([t.numel() for t in like])
    return [view_like(piece, model) for piece, model in zip(pieces, like, strict=True)]
