"""Main grads under ZeRO-2 and -3: each replica keeps sums over the replicas, of its pieces of the weights.

Gradients of a bucket wait until all of them are there. Then they move into one of `NUM_GRAD_SLOTS` flat buffers, which
are reduce-scattered, each segment into the main grads of its replica. The next bucket but one uses the same buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar.ir.grad_buckets import NUM_GRAD_SLOTS
from autopar.ops import wgrad_accumulation
from autopar.runtime.comm.protocols import FlagChannel, SendHandle
from autopar.runtime.params.flat_buckets import FlatBucket
from autopar.runtime.params.grad_sums import add_gradients, take_gradients
from autopar.runtime.params.sharded_params import ShardedParams


class ShardedGrads:
    """Main grads of this replica's pieces of weights, and the gradients of a backward on their way to the replicas.

    It stands for `GradBuffer` and `GradReducer` together. Every backward reduces its gradients, and adds them to those
    of earlier ones. Only the next bucket in order has memory: gradients of later ones wait where autograd or a layer
    left them.

    Error: gradients wait longer where one of an earlier bucket is late or missing, and more memory is taken than
        predicted.
    """

    def __init__(self, sharded: ShardedParams, ranks: Sequence[int], flags: FlagChannel) -> None:
        """Watch the parameters of which ``sharded`` has this replica's pieces; ``ranks`` are all replicas."""
        self.parameters, self.buckets, self.device = sharded.parameters, sharded.buckets, sharded.device
        self.replica, self.collectives = sharded.replica, sharded.collectives
        self.bucket_of, self.like = sharded.bucket_of, sharded.like
        self.updated = sharded.pieces  # what an optimizer updates, by name
        self.ranks, self.flags = tuple(ranks), flags
        self.slots: list[torch.Tensor | None] = [None] * NUM_GRAD_SLOTS
        self.in_flight: dict[int, SendHandle] = {}  # reductions by slot
        self.slot_views: dict[int, Mapping[str, torch.Tensor]] = {}
        self.owned = [self.owned_segment(bucket) for bucket in self.buckets]
        self.views = self.owned_views()
        self.summed: set[str] = set()  # pieces with a main grad
        self.filled: set[int] = set()  # buckets whose main grads hold a number
        self.over_copies: set[int] = set()  # those whose main grads are summed over copies of this replica's pieces
        self.main_grads: dict[str, SlotGrad] = {}
        self.hooks: list[RemovableHandle] = []
        self.reset()
        for name in self.bucket_of:
            self.watch(name, self.parameters[name])

    def owned_segment(self, bucket: FlatBucket) -> torch.Tensor:
        """Main grads of this replica's segment of a bucket, flat."""
        low, high = bucket.bounds[self.replica : self.replica + 2]
        return torch.zeros(high - low, dtype=bucket.dtype, device=self.device)

    def owned_views(self) -> dict[str, torch.Tensor]:
        """Main grads of this replica by name."""
        return {
            name: view
            for bucket, owned in zip(self.buckets, self.owned, strict=True)
            for name, view in bucket.owned_views(owned, self.replica, self.like).items()
        }

    def reset(self) -> None:
        """Forget gradients that are not reduced."""
        self.present: set[str] = set()  # weights with a gradient on this replica
        self.ready: list[list[tuple[str, torch.Tensor]]] = [[] for _ in self.buckets]
        self.direct: dict[str, torch.Tensor] = {}  # gradients that layers are writing elsewhere
        self.in_flight.clear()
        self.collectives.abandon()
        self.begin_order(())

    def begin_order(self, order: Sequence[int]) -> None:
        """Reduce these buckets next, in this order."""
        self.order, self.next = tuple(order), 0
        self.missing: dict[int, set[str]] = {}
        self.completed: Set[str] = frozenset()
        self.written: set[str] = set()  # weights of the next bucket whose gradient is in its slot

    # -- gradients -----------------------------------------------------------------------------------------------

    def watch(self, name: str, leaf: nn.Parameter) -> None:
        """Take the gradients of another leaf of a parameter too."""
        self.hooks.append(take_gradients(self, name, leaf))

    def main_grad_of(self, name: str) -> torch.Tensor | None:
        """Key under which a linear layer finds memory for a weight's gradient; None as in `GradBuffer.main_grad_of`."""
        if name not in self.bucket_of or not (like := self.like[name]).numel() or not like.is_contiguous():
            return None
        if name not in self.main_grads:
            key = torch.empty([1] * like.ndim, dtype=like.dtype, device=self.device)
            self.main_grads[name] = SlotGrad(self, name, key)
            wgrad_accumulation.register(key, self.main_grads[name])
        return self.main_grads[name].key

    def close(self) -> None:
        """Unregister the keys, and stop watching."""
        for main_grad in self.main_grads.values():
            wgrad_accumulation.unregister(main_grad.key)
        for hook in self.hooks:
            hook.remove()
        self.main_grads.clear()
        self.hooks.clear()

    def begin_backward(self, names: Set[str], completed: Set[str]) -> None:
        """Before a backward that reaches these weights: its buckets are those of them, on all replicas.

        Args:
            completed: those of them that no later backward before the update reaches.
        """
        reached = {index: {*bucket.names} & names for index, bucket in enumerate(self.buckets)}
        self.begin_order([index for index, own in reached.items() if own])
        self.missing, self.completed = reached, completed

    def mark_ready(self, name: str, gradient: torch.Tensor | None) -> None:
        """Note a gradient, or (None) that a layer has written it into its slot; reduce buckets that it completes."""
        index = self.bucket_of[name]
        self.present.add(name)
        if gradient is not None:
            self.ready[index].append((name, gradient))
        self.missing.get(index, set()).discard(name)
        while self.current is not None and not self.missing[self.current]:
            self.start()

    def flush(self) -> None:
        """After a backward: reduce its buckets that wait for missing gradients.

        So replicas with other gradients start a bucket after the same backward.
        """
        while self.current is not None:
            self.start()

    @property
    def current(self) -> int | None:
        """Bucket to be reduced next; None after the last one of the backward."""
        return self.order[self.next] if self.next < len(self.order) else None

    def open_slot(self, index: int) -> Mapping[str, torch.Tensor]:
        """Gradients of the next bucket in its slot, by name, after waiting for the slot's earlier reduction."""
        if (wait := self.in_flight.pop(index % NUM_GRAD_SLOTS, None)) is not None:
            wait()
        if index not in self.slot_views:
            self.slot_views[index] = self.buckets[index].views(self.slot_flat(index), self.like)
        return self.slot_views[index]

    def slot_flat(self, index: int) -> torch.Tensor:
        """Memory of a bucket in its slot, [bucket.numel]; allocated at the first call for any bucket of the slot."""
        bucket, slot = self.buckets[index], index % NUM_GRAD_SLOTS
        memory = self.slots[slot]
        if memory is None:
            num_bytes = max(other.num_bytes for other in self.buckets[slot::NUM_GRAD_SLOTS])
            memory = self.slots[slot] = torch.zeros(num_bytes, dtype=torch.uint8, device=self.owned[index].device)
        return memory[: bucket.num_bytes].view(bucket.dtype)

    def absorb_param_grads(self) -> None:
        """Take gradients that the user has set by hand."""
        for name in self.bucket_of:
            gradient = self.parameters[name].grad
            if gradient is not None:
                self.parameters[name].grad = None
                self.mark_ready(name, gradient)

    def attach_to_params(self) -> None:
        """Make the main grads the gradients of what the optimizer updates; None where there is none."""
        for name, updated in self.updated.items():
            updated.grad = self.views[name] if name in self.summed else None

    def detach_from_params(self) -> None:
        """Before a backward: unset the gradients of what the optimizer updates, and keep the main grads."""
        for name in self.summed:
            self.updated[name].grad = None

    def clear(self) -> None:
        """Drop all gradients; their memory stays."""
        self.summed.clear()
        self.filled.clear()
        self.over_copies.clear()
        self.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes that stay allocated between steps."""
        return sum(flat.nbytes for flat in (*self.owned, *self.slots) if flat is not None)

    # -- reduction -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Move the next bucket's gradients into its slot, with zeros for missing ones, and start their reduction."""
        index = self.order[self.next]
        views = self.open_slot(index)
        add_gradients(views, self.ready[index], self.written)
        self.ready[index] = []
        if missing := [view for name, view in views.items() if name not in self.written]:
            torch._foreach_zero_(missing)
        self.written.clear()
        is_last = self.completed >= {*self.buckets[index].names}
        self.in_flight[index % NUM_GRAD_SLOTS] = self.collectives.reduce_scatter(
            self.slot_flat(index), self.buckets[index], self.owned[index], index in self.filled, over_copies=is_last
        )
        self.filled.add(index)
        if is_last:
            self.over_copies.add(index)
        self.next += 1

    def finish(self, update_follows: bool = True) -> None:
        """Finish the reductions, also of gradients that a user has set, and attach the main grads.

        Args:
            update_follows: sum over copies of this replica's pieces too, which is done once before an update.
        """
        self.begin_order(())
        self.absorb_param_grads()
        waiting = {name for entries in self.ready for name, _ in entries}
        kinds = (self.present, waiting)
        counts = iter(self.flags.sum_flags([name in kind for kind in kinds for name in self.bucket_of], self.ranks))
        exist, late = ({name for name, count in zip(self.bucket_of, counts) if count} for _ in kinds)
        self.begin_order(sorted({self.bucket_of[name] for name in late}))
        self.flush()
        for wait in self.in_flight.values():
            wait()
        if update_follows:
            rest = [self.owned[index] for index in sorted(self.filled - self.over_copies)]
            for wait in map(self.collectives.sum_over_copies, rest):
                wait()
        self.summed |= exist & self.views.keys()
        self.attach_to_params()
        self.reset()


@dataclass(frozen=True, eq=False)
class SlotGrad:
    """Gradient of a weight as the linear layer that computes it sees it: in the next bucket's slot, or elsewhere."""

    gradients: ShardedGrads
    name: str
    key: torch.Tensor

    def buffer(self) -> torch.Tensor:
        grads, like = self.gradients, self.gradients.like[self.name]
        if grads.bucket_of[self.name] == grads.current:
            return grads.open_slot(grads.bucket_of[self.name])[self.name]
        grads.direct[self.name] = torch.empty_like(like, device=self.key.device)
        return grads.direct[self.name]

    def is_initialized(self) -> bool:
        return self.name in self.gradients.written and self.name not in self.gradients.direct

    def mark_accumulated(self) -> None:
        gradient = self.gradients.direct.pop(self.name, None)
        if gradient is None:
            self.gradients.written.add(self.name)
        self.gradients.mark_ready(self.name, gradient)
