"""ZeRO all-gather: each replica updates the weights that it owns, and all replicas gather them for the next forward.

Compute parameters are gathered during the next forward, a few buckets ahead. Float32 masters that another replica owns
are freed, and gathered only on demand.
"""

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

# Buckets that are gathered ahead of the one that is read. A CUDA graph that begins with all of them starts its forward
# late.
PREFETCH_BUCKETS = 3


class ZeroParamGather:
    """All-gathers a rank's trainable weights into flat memory that programs read.

    An update changes a weight on its owner only. The next step all-gathers the weights that its programs read, bucket
    by bucket in the order of a forward. Where programs read low-precision copies, owners make the copies, and only
    these are gathered. Float32 masters of other owners are stale from then on, and without memory during training,
    until `gather_masters` brings them. All replicas make the same calls.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[FlatBucket],
        replica: int,
        collectives: ReplicaCollectives,
    ) -> None:
        """Move parameters that programs read into their bucket's memory; all replicas hold equal weights."""
        self.parameters, self.buckets = parameters, tuple(buckets)
        self.replica, self.collectives = replica, collectives
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
        # By bucket with copies: weights that this replica owns and copies for all, and weights of the other replicas,
        # whose masters can be without memory. ``like`` has the shapes and strides of all.
        self.owned_params = [b.names_of(replica) if b.copy_dtype is not None else () for b in self.buckets]
        self.remote_params = [
            [n for n in bucket.names if n not in owned] if bucket.copy_dtype is not None else []
            for bucket, owned in zip(self.buckets, self.owned_params, strict=True)
        ]
        self.like = {name: parameters[name].detach().to("meta") for name in self.bucket_of}
        self.masters_freed = False
        self.pending: dict[int, SendHandle] = {}
        self.num_started = len(self.buckets)  # buckets started, in the order of a forward
        # Waits for the bucket of each weight: one callable for all weights of a bucket.
        self.waits: dict[str, Callable[[], None]] = {}
        for index, bucket in enumerate(self.buckets):
            self.waits |= dict.fromkeys(bucket.names, partial(self.wait_for, index))
        self.mark_overwritten()

    def mark_overwritten(self) -> None:
        """Note that all replicas have overwritten all weights."""
        self.gathered = False

    def mark_updated(self) -> None:
        """Note that each replica has updated the weights that it owns."""
        self.gathered = self.masters_gathered = False

    def abandon(self) -> None:
        """Drop the all-gathers of a step that raised."""
        self.pending.clear()
        self.num_started = len(self.buckets)
        self.gathered = self.masters_gathered = False

    def gather(self, always: bool = False) -> None:
        """Start the all-gather of the weights that programs read, if they have changed since the last one.

        Args:
            always: also without changes, because a captured step must not depend on the steps before it.
        """
        if self.gathered and not always:
            return
        self.num_started = 0
        for number, owned in enumerate(reversed(self.owned_params), start=1):
            if owned:
                torch._foreach_copy_([self.copies[n] for n in owned], [self.parameters[n].detach() for n in owned])
            self.prefetch(min(number, PREFETCH_BUCKETS))  # the first buckets travel while the others are copied
        self.gathered = True

    def prefetch(self, count: int) -> None:
        """Start the all-gather of the first ``count`` buckets in the order of a forward, if it is due."""
        for number in range(self.num_started, min(count, len(self.buckets))):
            index = len(self.buckets) - 1 - number
            self.pending[index] = self.collectives.all_gather(self.flats[index], self.buckets[index])
            self.num_started = number + 1

    def wait_for(self, index: int) -> None:
        """Wait for the all-gather of a bucket, if one is due, and prefetch the next buckets."""
        self.prefetch(len(self.buckets) - index + PREFETCH_BUCKETS)
        if index in self.pending:
            self.pending.pop(index)()

    def wait(self) -> None:
        """Wait for all all-gathers that are due."""
        self.prefetch(len(self.buckets))
        for index in [*self.pending]:
            self.wait_for(index)

    def free_remote_masters(self) -> None:
        """Free the masters that other replicas own; until `gather_masters` they read as NaN."""
        if self.masters_freed or all(bucket.copy_dtype is None for bucket in self.buckets):
            return
        for name in chain(*self.remote_params):
            master = self.parameters[name]
            master.data = torch.full((), nan, dtype=master.dtype, device=master.device).expand(master.shape)
        self.masters_freed, self.masters_gathered = True, False

    def gather_masters(self, always: bool = False) -> None:
        """All-gather the stored weights, if they are stale, or ``always`` as in `gather`."""
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
            self.collectives.all_gather(flat, bucket)()
            if bucket.copy_dtype is not None and remote:
                torch._foreach_copy_([self.parameters[n].detach() for n in remote], [views[n] for n in remote])
        self.masters_gathered = True

    @property
    def num_bytes(self) -> int:
        """Bytes in addition to the weights: copies and padding."""
        weights = sum(self.parameters[n].nbytes for n in self.bucket_of if n not in self.copies)
        return sum(flat.nbytes for flat in self.flats) - weights
