"""Main grads under ZeRO-2: each replica keeps sums over the replicas, of the weights that it owns.

Gradients of a bucket wait until all of them are there. Then they move into one of `NUM_GRAD_SLOTS` flat buffers, which
are reduce-scattered, each segment into the main grads of its owner. The next bucket but one uses the same buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar.ir.grad_buckets import NUM_GRAD_SLOTS
from autopar.ops import wgrad_accumulation
from autopar.runtime.comm.protocols import FlagChannel, SendHandle
from autopar.runtime.comm.replica_collectives import ReplicaCollectives
from autopar.runtime.params.flat_buckets import FlatBucket
from autopar.runtime.params.grad_sums import add_gradients, take_gradients


class ShardedGrads:
    """Main grads of the weights that this replica owns, and the gradients of a backward on their way to the owners.

    It stands for `GradBuffer` and `GradReducer` together. Every call that runs a backward reduces its gradients, and
    adds them to those of earlier calls. Only the next bucket in order has memory: gradients of later ones wait where
    autograd or a layer left them.

    Error: gradients wait longer where one of an earlier bucket is late or missing, and more memory is taken than
        predicted.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[FlatBucket],
        ranks: Sequence[int],
        replica: int,
        flags: FlagChannel,
        collectives: ReplicaCollectives,
    ) -> None:
        """Watch the parameters; ``ranks`` are the replicas in order, and this one is number ``replica``."""
        self.parameters, self.buckets = parameters, tuple(buckets)
        self.ranks, self.replica, self.flags, self.collectives = tuple(ranks), replica, flags, collectives
        self.bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        # Shapes and strides; the parameters themselves may be without memory.
        self.like = {name: parameters[name].detach().to("meta") for name in self.bucket_of}
        self.slots: list[torch.Tensor | None] = [None] * NUM_GRAD_SLOTS
        self.in_flight: dict[int, SendHandle] = {}  # reductions by slot
        self.slot_views: dict[int, Mapping[str, torch.Tensor]] = {}
        self.owned = [self.owned_segment(bucket) for bucket in self.buckets]
        self.views = self.owned_views()
        self.summed: set[str] = set()  # owned weights with a main grad
        self.filled: set[int] = set()  # buckets whose main grads hold a number
        self.main_grads: dict[str, SlotGrad] = {}
        self.hooks: list[RemovableHandle] = []
        self.reset()
        for name in self.bucket_of:
            self.watch(name, parameters[name])

    def owned_segment(self, bucket: FlatBucket) -> torch.Tensor:
        """Main grads of the weights of a bucket that this replica owns, flat."""
        low, high = bucket.bounds[self.replica : self.replica + 2]
        return torch.zeros(high - low, dtype=bucket.dtype, device=self.parameters[bucket.names[0]].device)

    def owned_views(self) -> dict[str, torch.Tensor]:
        """Main grads of this replica by name."""
        return {
            name: view
            for bucket, owned in zip(self.buckets, self.owned, strict=True)
            for name, view in bucket.owned_views(owned, self.replica, self.like).items()
        }

    def reset(self) -> None:
        """Forget a backward's gradients."""
        self.missing = [set(bucket.names) for bucket in self.buckets]
        self.complete: set[str] = set()
        self.present: set[str] = set()  # weights with a gradient on this replica
        self.ready: list[list[tuple[str, torch.Tensor]]] = [[] for _ in self.buckets]
        self.written: set[str] = set()  # weights of the next bucket whose gradient is in its slot
        self.direct: dict[str, torch.Tensor] = {}  # gradients that layers are writing elsewhere
        self.next = 0  # bucket to be reduced next
        self.in_flight.clear()
        self.collectives.abandon()

    # -- gradients -----------------------------------------------------------------------------------------------

    def watch(self, name: str, leaf: nn.Parameter) -> None:
        """Take the gradients of another leaf of a parameter too."""
        self.hooks.append(take_gradients(self, name, leaf))

    def main_grad_of(self, name: str) -> torch.Tensor | None:
        """Key under which a linear layer finds memory for a weight's gradient; None as in `GradBuffer.main_grad_of`."""
        if name not in self.bucket_of or not (like := self.like[name]).numel() or not like.is_contiguous():
            return None
        if name not in self.main_grads:
            key = torch.empty([1] * like.ndim, dtype=like.dtype, device=self.parameters[name].device)
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

    def mark_ready(self, name: str, gradient: torch.Tensor | None) -> None:
        """Note a gradient, or (None) that a layer has written it into its slot; reduce buckets that it completes."""
        index = self.bucket_of[name]
        self.present.add(name)
        if gradient is not None:
            self.ready[index].append((name, gradient))
        if name in self.complete:
            self.missing[index].discard(name)
            self.start_complete()

    def flush(self) -> None:
        """After a backward: reduce buckets that wait for nothing but gradients which it did not produce.

        So replicas with other gradients start a bucket after the same backward. Were it later, replicas that wait for
        its slot could wait for each other where ranks have several stages.
        """
        for missing in self.missing:
            missing -= self.complete
        self.start_complete()

    def start_complete(self) -> None:
        """Reduce the next buckets, as far as they are complete."""
        while self.next < len(self.buckets) and not self.missing[self.next]:
            self.start()

    def open_slot(self) -> Mapping[str, torch.Tensor]:
        """Gradients of the next bucket in its slot, by name, after waiting for the slot's earlier reduction."""
        index, slot = self.next, self.next % NUM_GRAD_SLOTS
        if (wait := self.in_flight.pop(slot, None)) is not None:
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
            if gradient is not None and gradient is not self.views.get(name):
                self.parameters[name].grad = None
                self.mark_ready(name, gradient)

    def attach_to_params(self) -> None:
        """Make the main grads the gradients of the parameters that this replica owns; None where there is none."""
        for name in self.bucket_of:
            self.parameters[name].grad = self.views[name] if name in self.summed else None

    def detach_from_params(self) -> None:
        """Before a backward: unset the parameters' gradients, and keep the main grads."""
        for name in self.summed:
            self.parameters[name].grad = None

    def clear(self) -> None:
        """Drop all gradients; their memory stays."""
        self.summed.clear()
        self.filled.clear()
        self.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes that stay allocated between steps."""
        return sum(flat.nbytes for flat in (*self.owned, *self.slots) if flat is not None)

    # -- reduction -----------------------------------------------------------------------------------------------

    def set_used_params(self, names: Collection[str]) -> None:
        """The backwards of this call reach only these weights: no bucket waits for others."""
        for missing in self.missing:
            missing &= {*names}

    def enable_sync(self, names: Collection[str]) -> None:
        """The next gradients of these weights are the last of this call: they complete their buckets."""
        self.complete |= {*names}

    def start(self) -> None:
        """Move the next bucket's gradients into its slot, with zeros for missing ones, and start their reduction."""
        index, views = self.next, self.open_slot()
        add_gradients(views, self.ready[index], self.written)
        self.ready[index] = []
        if missing := [view for name, view in views.items() if name not in self.written]:
            torch._foreach_zero_(missing)
        self.written.clear()
        self.in_flight[index % NUM_GRAD_SLOTS] = self.collectives.reduce_scatter(
            self.slot_flat(index), self.buckets[index], self.owned[index], adds=index in self.filled
        )
        self.filled.add(index)
        self.next += 1

    def flush_remaining(self) -> None:
        """After the last backward of a call: start the buckets that wait for missing gradients.

        This precedes all other collectives, so that all replicas call in one order.
        """
        self.absorb_param_grads()
        while self.next < len(self.buckets):
            self.start()

    def finish(self) -> None:
        """Finish the reductions, if any replica has gradients since the last call, and attach the main grads."""
        self.absorb_param_grads()
        counts = self.flags.sum_flags([name in self.present for name in self.bucket_of], self.ranks)
        if self.next or any(counts):
            self.flush_remaining()
            for wait in self.in_flight.values():
                wait()
            exist = {name for name, count in zip(self.bucket_of, counts, strict=True) if count}
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
        if grads.bucket_of[self.name] == grads.next:
            return grads.open_slot()[self.name]
        grads.direct[self.name] = torch.empty_like(like, device=self.key.device)
        return grads.direct[self.name]

    def is_initialized(self) -> bool:
        return self.name in self.gradients.written and self.name not in self.gradients.direct

    def mark_accumulated(self) -> None:
        gradient = self.gradients.direct.pop(self.name, None)
        if gradient is None:
            self.gradients.written.add(self.name)
        self.gradients.mark_ready(self.name, gradient)
