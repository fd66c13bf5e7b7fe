"""Sharded parameters: each replica stores and updates a part of the weights, and gathers what its programs read.

Gathered parameters stay allocated under ZeRO-1 and -2, and are gathered once a step, under its first forward. Under
ZeRO-3 that is so of the blocks that a plan keeps. All others are gathered before each use, in forwards and backwards,
into a few slots that blocks take turns in. Gathers are prefetched in the order in which the last step read the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.ir.grad_buckets import NUM_PARAM_SLOTS
from autopar.runtime.comm.protocols import SendHandle
from autopar.runtime.comm.replica_collectives import ReplicaCollectives
from autopar.runtime.params.flat_buckets import FlatBucket, piece_of

# Buckets that are gathered ahead of the one that is read. A CUDA graph that begins with all of them starts its forward
# late.
PREFETCH_BUCKETS = 3


class ShardedParams:
    """A replica's pieces of a rank's trainable weights, and the buffers from which programs read whole ones.

    An optimizer updates ``pieces``. Programs read ``leaves``: views of weights, or of low-precision copies of them, in
    the buffer of their bucket. A kept bucket has its own buffer; the other buckets take turns in a few slots. A program
    waits for the buckets that a step reads before it runs the step (`wait_for`); a backward does so when it reads a
    tensor that autograd saved from a slot (`saving`). A slot is thus free as soon as the kernels that read it are
    enqueued.

    All replicas make the same calls, and read buckets in the same order.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[FlatBucket],
        replica: int,
        collectives: ReplicaCollectives,
        device: torch.device,
    ) -> None:
        """Copy this replica's pieces of the parameters, which are equal on all replicas and may lie on the CPU."""
        self.parameters, self.buckets = parameters, tuple(buckets)
        self.replica, self.collectives, self.device = replica, collectives, device
        self.bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        self.like = {name: parameters[name].detach().to("meta") for name in self.bucket_of}
        self.buffers: dict[int, torch.Tensor] = {}
        self.masters: list[torch.Tensor] = []  # this replica's segment of each bucket
        self.shards: list[torch.Tensor] = []  # the segment in the dtype that programs read
        self.pieces: dict[str, nn.Parameter] = {}
        self.leaves: dict[str, nn.Parameter] = {}
        self.gathered = [i for i, bucket in enumerate(self.buckets) if not bucket.is_kept]
        sizes = [self.buckets[i].longest_segment * self.dtype_of(i).itemsize for i in self.gathered]
        self.shared = collectives.share(sizes)  # segments of buckets that are not kept, on GPUs with peer access
        for index in range(len(self.buckets)):
            self.add_bucket(index)
        self.copied = {name for bucket in self.buckets if bucket.copy_dtype is not None for name in bucket.names}
        self.in_order = tuple(reversed(range(len(self.buckets))))  # in which a forward reads them
        self.slots: list[torch.Tensor] = []
        self.slot_of: dict[int, Hashable] = {i: ("kept", i) for i, b in enumerate(self.buckets) if b.is_kept}
        self.read_together: set[frozenset[int]] = {frozenset()}
        self.read_masters: set[str] = set()  # weights of which programs read copies and masters
        self.is_stale = True  # whether the shards are those of earlier masters
        self.loaded: dict[Hashable, int] = {}  # bucket in each slot
        self.pending: dict[int, SendHandle] = {}  # gathers by bucket
        self.order, self.position = self.in_order, 0  # expected reads of buckets, and the last of them
        self.reads: list[int] = []  # buckets that the step has read, in order
        self.recent: list[int] = []  # the last buckets that were read, which prefetches leave in their slots
        self.allocate_slots()
        self.waits: dict[tuple[int, ...], Callable[[], None]] = {}  # functions of `wait_for`, by buckets

    # -- memory --------------------------------------------------------------------------------------------------

    def add_bucket(self, index: int) -> None:
        """Allocate this replica's segment of a bucket, and the buffer of one that is kept."""
        bucket, has_copies = self.buckets[index], self.buckets[index].copy_dtype is not None
        low, high = bucket.bounds[self.replica : self.replica + 2]
        dtype = self.dtype_of(index)
        if bucket.is_kept:
            self.buffers[index] = torch.zeros(bucket.numel, dtype=dtype, device=self.device)
            shard = self.buffers[index][low:high]
        elif self.shared is not None:
            shard = self.shared.own(self.gathered.index(index), high - low, dtype).zero_()
        else:
            shard = torch.zeros(high - low, dtype=dtype, device=self.device)
        master = torch.zeros(high - low, dtype=bucket.dtype, device=self.device) if has_copies else shard
        self.shards.append(shard)
        self.masters.append(master)
        elements = bucket.pieces(self.replica)
        for name, view in bucket.owned_views(master, self.replica, self.like).items():
            view.copy_(piece_of(self.parameters[name].detach(), elements[name], self.like[name]))
            self.pieces[name] = nn.Parameter(view)
        for name in bucket.names:
            self.leaves[name] = parameter = self.parameters[name]
            if has_copies:
                self.leaves[name] = nn.Parameter(torch.empty(0, dtype=dtype, device=self.device))
                placeholder = torch.full((), nan, dtype=bucket.dtype, device=self.device)
                parameter.data = placeholder.expand(parameter.shape)
        if bucket.is_kept:
            self.set_leaves(index)

    def dtype_of(self, index: int) -> torch.dtype:
        """Dtype in which programs read a bucket."""
        return self.buckets[index].copy_dtype or self.buckets[index].dtype

    def set_leaves(self, index: int) -> None:
        """Have the leaves of a bucket be views of its buffer."""
        for name, view in self.buckets[index].views(self.buffers[index], self.like).items():
            # ``data`` has its own version counter: autograd would take a gather for a change of what it has saved.
            self.leaves[name].data = view.data

    def allocate_slots(self) -> bool:
        """Assign buckets that are not kept to slots, after programs were built; returns whether leaves have moved."""
        self.num_protected = max(2, *map(len, self.read_together))
        slots = assign_slots([*reversed(self.gathered)], self.read_together)
        if all(self.slot_of.get(index) == slot for index, slot in slots.items()):
            return False
        self.drain()
        num_bytes: dict[int, int] = {}
        for index, slot in slots.items():
            num_bytes[slot] = max(num_bytes.get(slot, 0), self.buckets[index].numel * self.shards[index].itemsize)
        self.slots = []  # frees the old ones first
        self.slots = [torch.zeros(num_bytes[k], dtype=torch.uint8, device=self.device) for k in range(len(num_bytes))]
        for index, slot in slots.items():
            used = self.slots[slot][: self.buckets[index].numel * self.shards[index].itemsize]
            self.buffers[index] = used.view(self.shards[index].dtype)
            self.set_leaves(index)
        self.slot_of |= slots
        self.loaded = {slot: index for slot, index in self.loaded.items() if self.buckets[index].is_kept}
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of segments, buffers and slots."""
        kept = sum(self.buffers[i].nbytes for i, bucket in enumerate(self.buckets) if bucket.is_kept)
        apart = [self.shards[i].nbytes for i, bucket in enumerate(self.buckets) if not bucket.is_kept]
        masters = [self.masters[i].nbytes for i, bucket in enumerate(self.buckets) if bucket.copy_dtype is not None]
        read = sum(self.like[name].nbytes for name in self.read_masters)
        return kept + sum(apart) + sum(masters) + sum(slot.nbytes for slot in self.slots) + read

    # -- gathers -------------------------------------------------------------------------------------------------

    def begin(self, order: Sequence[int], always: bool = False) -> None:
        """Before a step: have every gather read this replica's present masters, and start the first ones.

        Args:
            order: `reads` of an earlier step of the same programs; empty if there was none.
            always: drop what was gathered, also if masters have not changed, because a captured step must not depend on
                the steps before it.
        """
        self.order, self.position = tuple(order) or self.in_order, 0
        self.reads, self.recent = [], []
        if not (self.is_stale or always):
            return
        self.drain()
        self.loaded.clear()
        self.synchronize()
        expected = tuple(dict.fromkeys((*self.order, *self.in_order)))
        first, rest = expected[:PREFETCH_BUCKETS], expected[PREFETCH_BUCKETS:]
        for indices in (first, rest):
            for index in indices:
                if self.buckets[index].copy_dtype is not None:
                    self.shards[index].copy_(self.masters[index])
            self.synchronize()
            self.prefetch(first)  # travel while the others are cast
        self.is_stale = False
        self.gather_read_masters()

    def synchronize(self) -> None:
        """Wait for the other replicas, where they read this one's segments."""
        if self.shared is not None:
            self.shared.synchronize()

    def wait_for(self, names: Collection[str]) -> Callable[[], None] | None:
        """Function that a program calls before a step that reads these weights; None if none of them is sharded.

        Equal buckets have one function. Buckets that are read together get different slots (`allocate_slots`).
        """
        indices = sorted({self.bucket_of[name] for name in names if name in self.bucket_of}, reverse=True)
        if not indices:
            return None
        self.read_together.add(frozenset(i for i in indices if not self.buckets[i].is_kept))
        return self.waits.setdefault(tuple(indices), partial(self.read, tuple(indices)))

    def read(self, indices: Sequence[int]) -> None:
        """Wait for the gathers of buckets that are read together, and prefetch the next ones."""
        for index in indices:
            if self.reads[-1:] != [index]:
                self.reads.append(index)
                others = [i for i in self.recent if i != index]
                self.recent = [*others, index][-self.num_protected :]
            self.load(index)
        for index in indices:
            if (wait := self.pending.pop(index, None)) is not None:
                wait()
        for index in indices:
            if index in self.order[self.position :]:
                self.position = self.order.index(index, self.position)
        self.prefetch(self.next_reads())

    def next_reads(self) -> list[int]:
        """The next `PREFETCH_BUCKETS` different buckets after the last one, in the expected order."""
        following: dict[int, None] = {}
        for index in self.order[self.position + 1 :]:
            following[index] = None
            if len(following) == PREFETCH_BUCKETS:
                break
        return [*following]

    def prefetch(self, following: Sequence[int]) -> None:
        """Start gathers of buckets in the order of their reads, until one would replace a bucket that is read before
        it, or was read just now."""
        for number, index in enumerate(following):
            present = self.loaded.get(self.slot_of[index])
            if present is not None and present != index and present in (*self.recent, *following[:number]):
                return
            self.load(index)

    def load(self, index: int) -> None:
        """Start the gather of a bucket, unless its slot has it."""
        slot = self.slot_of[index]
        present = self.loaded.get(slot)
        if present == index:
            return
        if present is not None and (wait := self.pending.pop(present, None)) is not None:
            wait()
        self.loaded[slot] = index
        bucket, buffer = self.buckets[index], self.buffers[index]
        if self.shared is not None and not bucket.is_kept:
            self.pending[index] = self.shared.start_gather(self.gathered.index(index), bucket.segments(buffer))
            return
        if not bucket.is_kept:
            bucket.segments(buffer)[self.replica].copy_(self.shards[index])
        self.pending[index] = self.collectives.all_gather(buffer, bucket)

    def drain(self) -> None:
        """Wait for all gathers that have started."""
        while self.pending:
            self.pending.popitem()[1]()

    def mark_updated(self) -> None:
        """Note that masters have changed."""
        self.is_stale = True

    def abandon(self) -> None:
        """Drop the gathers of a step that raised."""
        self.pending.clear()
        self.loaded.clear()
        self.is_stale = True

    # -- what autograd saves -------------------------------------------------------------------------------------

    def saving(self) -> saved_tensors_hooks:
        """Context of a forward: reads of slots by its backward wait for their buckets."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """The object that autograd stores for a saved tensor: a `SavedView` of a slot, or the tensor."""
        address = tensor.untyped_storage().data_ptr()
        for number, slot in enumerate(self.slots):
            if slot.untyped_storage().data_ptr() == address:
                return SavedView(self.loaded[number], tensor.detach())
        # An operation that saves its own result would keep itself alive.
        return tensor.detach() if tensor.grad_fn is not None else tensor

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor that `pack` was given."""
        if not isinstance(saved, SavedView):
            return saved
        self.read((saved.index,))
        return saved.tensor

    # -- masters -------------------------------------------------------------------------------------------------

    def whole_values(self, pieces: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each weight, gathered from all replicas' pieces, which are in the masters' dtypes.

        All replicas iterate, over masters or their averages; a value is valid until the next one.
        """
        for bucket in reversed(self.buckets):
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=self.device)
            own = bucket.segments(flat)[self.replica]
            for name, view in bucket.owned_views(own, self.replica, self.like).items():
                view.copy_(pieces[name].detach())
            self.collectives.all_gather(flat, bucket)()
            yield from bucket.views(flat, self.like).items()

    def elements_of(self, name: str) -> range:
        """Elements of a weight, in its memory order, that are this replica's piece of it."""
        return self.buckets[self.bucket_of[name]].pieces(self.replica).get(name, range(0))

    def piece_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This replica's piece of a tensor like a weight."""
        return piece_of(tensor, self.elements_of(name), self.like[name])

    def whole_of(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """A tensor like a weight with this replica's piece of it, and zeros elsewhere."""
        whole = torch.zeros_like(self.like[name], device=piece.device)
        self.piece_of(name, whole).copy_(piece)
        return whole

    def gather_read_masters(self) -> None:
        """Gather the masters that programs read although they read copies too."""
        if not self.read_masters:
            return
        for name, master in self.whole_values(self.pieces):
            if name in self.read_masters:
                parameter = self.parameters[name]
                if parameter.untyped_storage().nbytes() < parameter.nbytes:
                    parameter.data = torch.empty_like(self.like[name], device=self.device)
                parameter.detach().copy_(master)


@dataclass(frozen=True)
class SavedView:
    """View of a slot that autograd has saved, and the bucket that it is of."""

    index: int
    tensor: torch.Tensor


def assign_slots(order: Sequence[int], read_together: Collection[frozenset[int]]) -> dict[int, int]:
    """Slot of each bucket: buckets take turns, except that no two that are read together share a slot.

    Args:
        order: buckets in the order of their reads in a forward.
        read_together: sets of such buckets.
    """
    largest = max(map(len, read_together), default=1)
    count = min(len(order), max(NUM_PARAM_SLOTS, largest + 1))
    slots: dict[int, int] = {}
    for number, index in enumerate(order):
        taken = {slots[other] for group in read_together if index in group for other in group if other in slots}
        free = [slot for slot in ((number + k) % count for k in range(count)) if slot not in taken]
        slots[index] = free[0] if free else count
        count += not free
    return slots
