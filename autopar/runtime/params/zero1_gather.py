"""Weights that replicas update each in part, under ZeRO-1: brought to all of them before programs read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import nan

import torch
from torch import nn

from autopar.runtime.comm.protocols import SendHandle
from autopar.runtime.comm.replica_collectives import ReplicaCollectives
from autopar.runtime.params.flat_buckets import FlatBucket

PREFETCH_BUCKETS = (
    3  # buckets under way beside the one that is read: a graph that begins with all of them starts its forward late
)


class ZeroParamGather:
    """What programs read of a rank's trainable weights, in flat memory that collectives fill in place.

    An update changes a weight on its owner only. The next step begins by gathering what its programs read, bucket by
    bucket in the order in which a forward needs them: low-precision copies, which owners make before they travel, where
    programs read no others. Float32 masters that others own are behind from then on, and without memory where training
    goes on, until somebody who reads them asks for them by `gather_masters`. All replicas make the same calls.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[FlatBucket],
        replica: int,
        exchange: ReplicaCollectives,
    ) -> None:
        """Give parameters that programs read themselves memory in their bucket; all replicas hold equal weights."""
        self.parameters, self.buckets = parameters, tuple(buckets)
        self.replica, self.exchange = replica, exchange
        self.flats: list[torch.Tensor] = []
        self.copies: dict[str, torch.Tensor] = {}
        self.bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        for bucket in self.buckets:
            device = parameters[bucket.names[0]].device
            flat = torch.zeros(bucket.numel, dtype=bucket.copy_dtype or bucket.dtype, device=device)
            views = bucket.views(flat, parameters)
            self.flats.append(flat)
            if bucket.copy_dtype is not None:
                self.copies |= views
                continue
            for name, view in views.items():
                view.copy_(parameters[name].detach())
                parameters[name].data = view
        self.gathered = self.masters_gathered = True
        # Of each bucket of copies the weights that this replica owns, which it copies for all, and those of the others,
        # whose masters can be without memory; and what all look like with it.
        self.owned_params = [b.names_of(replica) if b.copy_dtype is not None else () for b in self.buckets]
        self.remote_params = [
            [n for n in bucket.names if n not in owned] if bucket.copy_dtype is not None else []
            for bucket, owned in zip(self.buckets, self.owned_params, strict=True)
        ]
        self.like = {name: parameters[name].detach().to("meta") for name in self.bucket_of}
        self.masters_freed = False
        self.pending: dict[int, SendHandle] = {}
        self.num_started = len(self.buckets)  # in the order of a forward
        # For each weight what waits for its bucket: one callable for all of a bucket.
        self.waits: dict[str, Callable[[], None]] = {}
        for index, bucket in enumerate(self.buckets):
            self.waits |= dict.fromkeys(bucket.names, partial(self.wait_for, index))
        self.mark_overwritten()

    def mark_overwritten(self) -> None:
        """All replicas have overwritten all weights."""
        self.gathered = False

    def mark_updated(self) -> None:
        """Each replica has updated the weights that it owns."""
        self.gathered = self.masters_gathered = False

    def abandon(self) -> None:
        """Forget what is under way, of a step that raised."""
        self.pending.clear()
        self.num_started = len(self.buckets)
        self.gathered = self.masters_gathered = False

    def gather(self, always: bool = False) -> None:
        """Start to bring what programs read to all replicas, if it has changed since the last time.

        Args:
            always: also if it has not: what a recorded step does must not depend on what was before it.
        """
        if self.gathered and not always:
            return
        self.num_started = 0
        for number, own in enumerate(reversed(self.owned_params), start=1):
            if own:
                torch._foreach_copy_([self.copies[n] for n in own], [self.parameters[n].detach() for n in own])
            self.prefetch(min(number, PREFETCH_BUCKETS))  # the first ones travel while the others are copied
        self.gathered = True

    def prefetch(self, count: int) -> None:
        """Start gathering the first so many buckets, those that a forward needs first, if they are to be gathered."""
        for number in range(self.num_started, min(count, len(self.buckets))):
            index = len(self.buckets) - 1 - number
            self.pending[index] = self.exchange.all_gather(self.flats[index], self.buckets[index])
            self.num_started = number + 1

    def wait_for(self, index: int) -> None:
        """Wait for a bucket, if it is to be gathered, while the next ones follow."""
        self.prefetch(len(self.buckets) - index + PREFETCH_BUCKETS)
        if index in self.pending:
            self.pending.pop(index)()

    def wait(self) -> None:
        """Wait for all that is to be gathered."""
        self.prefetch(len(self.buckets))
        for index in [*self.pending]:
            self.wait_for(index)

    def free_remote_masters(self) -> None:
        """Give up the memory of masters that other replicas own: until they are gathered, they read as not a number."""
        if self.masters_freed or all(bucket.copy_dtype is None for bucket in self.buckets):
            return
        for name in chain(*self.remote_params):
            master = self.parameters[name]
            master.data = torch.full((), nan, dtype=master.dtype, device=master.device).expand(master.shape)
        self.masters_freed, self.masters_gathered = True, False

    def gather_masters(self, always: bool = False) -> None:
        """Bring the weights as they are stored to all replicas, if they are behind, or ``always`` as in `gather`."""
        if self.masters_gathered and not always:
            return
        self.wait()
        for name in chain(*self.remote_params) if self.masters_freed else ():
            self.parameters[name].data = torch.empty_like(self.like[name], device=self.parameters[name].device)
        self.masters_freed = False
        for index in reversed(range(len(self.buckets))):
            bucket, owned, remote = self.buckets[index], self.owned_params[index], self.remote_params[index]
            flat = self.flats[index]
            if bucket.copy_dtype is not None:
                flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=flat.device)
                views = bucket.views(flat, self.like)
                if owned:
                    torch._foreach_copy_([views[n] for n in owned], [self.parameters[n].detach() for n in owned])
            self.exchange.all_gather(flat, bucket)()
            if bucket.copy_dtype is not None and remote:
                torch._foreach_copy_([self.parameters[n].detach() for n in remote], [views[n] for n in remote])
        self.masters_gathered = True

    @property
    def num_bytes(self) -> int:
        """Bytes beyond the weights: of copies, and of padding."""
        own = sum(self.parameters[n].nbytes for n in self.bucket_of if n not in self.copies)
        return sum(flat.nbytes for flat in self.flats) - own
