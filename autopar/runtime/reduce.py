"""Gradients summed over ranks, and updated weights handed to those that did not update them; both in flat buckets."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.ir import BUCKET_BYTES
from autopar.runtime.transport import Delivery, Transport

UNDER_WAY = 2  # buckets of weights that are broadcast at one time


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that travel together; ``owner`` is the replica that updates them, None for each one."""

    names: tuple[str, ...]
    owner: int | None = None


def buckets_of(
    parameters: Mapping[str, torch.Tensor], owners: Mapping[str, int], limit_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """All parameters in buckets of at most ``limit_bytes`` (or one parameter), in the order in which a backward fills
    them, which is about the reverse of the model's.
    """
    filled: list[list[str]] = []
    latest: dict[tuple[torch.dtype, int | None], list[str]] = {}
    for name in reversed(list(parameters)):
        key = (parameters[name].dtype, owners.get(name))
        used = sum(parameters[n].nbytes for n in latest.get(key, ()))
        if key not in latest or used + parameters[name].nbytes > limit_bytes:
            latest[key] = []
            filled.append(latest[key])
        latest[key].append(name)
    place = {name: i for i, name in enumerate(reversed(list(parameters)))}
    return tuple(Bucket(tuple(names), owners.get(names[0])) for names in sorted(filled, key=lambda n: place[n[-1]]))


def balanced_owners(numel: Mapping[str, int], holders: Mapping[str, Sequence[int]], num_owners: int) -> dict[str, int]:
    """Who updates each weight: whole weights, balanced by elements on every stage.

    The largest come first, each to the owner with the least so far; a tied weight has one owner on all its stages.

    Args:
        holders: the stages that hold each weight.
    """
    load: defaultdict[tuple[int, int], int] = defaultdict(int)
    owners: dict[str, int] = {}
    for name in sorted(numel, key=lambda n: -numel[n]):
        owners[name] = min(range(num_owners), key=lambda owner: max(load[stage, owner] for stage in holders[name]))
        for stage in holders[name]:
            load[stage, owners[name]] += numel[name]
    return owners


def order_of(tensor: torch.Tensor) -> list[int]:
    """A tensor's dims from the outermost in memory to the innermost."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def packed(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor with all elements, each tensor's in the memory order of its counterpart in ``like``.

    A single tensor that is in that order already is not copied.
    """
    flat = [t.permute(order_of(model)).reshape(-1) for t, model in zip(tensors, like, strict=True)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat tensor with the shapes and memory orders of ``like``; inverse of `packed`."""
    views = []
    for piece, model in zip(flat.split([t.numel() for t in like]), like, strict=True):
        order = order_of(model)
        shape = [model.shape[dim] for dim in order]
        views.append(piece.view(shape).permute([order.index(dim) for dim in range(model.ndim)]))
    return views


class ReplicaSum:
    """Sums a rank's gradients over the replicas once a step.

    During a backward that was announced by `arm`, a bucket starts as soon as its gradients are there; the others start
    in `finish`. All ranks start the same buckets in the same order, whichever gradients each has: one that is missing
    counts as zeros, and stays missing where it is on every replica.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, int],
        ranks: Sequence[int],
        replica: int,
        transport: Transport,
    ) -> None:
        """Watch the parameters.

        Args:
            owners: the replica that a gradient is summed on; every one for parameters that are not listed.
            ranks: those of the replicas, in order; this one is at ``replica``.
        """
        self.parameters, self.ranks, self.replica, self.transport = parameters, tuple(ranks), replica, transport
        self.buckets = buckets_of(parameters, owners)
        self.bucket_of = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        self.armed = False
        self.reset()
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.came(name))

    def reset(self) -> None:
        self.missing = [set(bucket.names) for bucket in self.buckets]
        self.present: dict[str, bool] = {}
        self.started: list[tuple[torch.Tensor, Delivery]] = []

    def arm(self) -> None:
        """From now on gradients are complete when they come: this is the last backward before the update."""
        self.reset()
        self.armed = True

    def came(self, name: str) -> None:
        """Note a gradient, and start every bucket whose turn has come."""
        if not self.armed:
            return
        self.missing[self.bucket_of[name]].discard(name)
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self.start(self.buckets[len(self.started)])

    def start(self, bucket: Bucket) -> None:
        """Start summing a bucket; the gradients move into its memory."""
        members = [self.parameters[name] for name in bucket.names]
        self.present |= {name: p.grad is not None for name, p in zip(bucket.names, members)}
        flat = packed([torch.zeros_like(p) if p.grad is None else p.grad for p in members], members)
        for parameter in members:
            parameter.grad = None
        root = None if bucket.owner is None else self.ranks[bucket.owner]
        self.started.append((flat, self.transport.start_sum(flat, self.ranks, root)))

    def finish(self) -> None:
        """Leave the summed gradients in the parameters, under ZeRO-1 in those that this replica owns."""
        for bucket in self.buckets[len(self.started) :]:
            self.start(bucket)
        counts = self.transport.sum_flags([self.present[name] for name in self.parameters], self.ranks)
        exists = dict(zip(self.parameters, counts, strict=True))
        for bucket, (flat, delivery) in zip(self.buckets, self.started, strict=True):
            delivery()
            if bucket.owner in (None, self.replica):
                members = [self.parameters[name] for name in bucket.names]
                for name, parameter, gradient in zip(bucket.names, members, unpacked(flat, members), strict=True):
                    parameter.grad = gradient if exists[name] else None
        self.armed = False
        self.reset()

    def share_weights(self) -> None:
        """Hand every bucket from its owner to the other replicas."""
        under_way: deque[tuple[Bucket, torch.Tensor, Delivery]] = deque()
        for bucket in self.buckets:
            if len(under_way) == UNDER_WAY:
                self.take(*under_way.popleft())
            assert bucket.owner is not None, "nobody owns the bucket"
            members = [self.parameters[name].detach() for name in bucket.names]
            flat = packed(members, members)
            delivery = self.transport.start_broadcast(flat, self.ranks, self.ranks[bucket.owner])
            under_way.append((bucket, flat, delivery))
        while under_way:
            self.take(*under_way.popleft())

    def take(self, bucket: Bucket, flat: torch.Tensor, delivery: Delivery) -> None:
        """Wait for a bucket of weights, and copy them where another replica updated them."""
        delivery()
        if bucket.owner != self.replica:
            members = [self.parameters[name].detach() for name in bucket.names]
            for weight, updated in zip(members, unpacked(flat, members), strict=True):
                weight.copy_(updated)


def sum_gradients(parameters: Mapping[str, nn.Parameter], ranks: Sequence[int], transport: Transport) -> None:
    """Give each of the parameters, all of which have a gradient, the sum of it over the ranks."""
    started = []
    for bucket in buckets_of(parameters, {}):
        members = [parameters[name] for name in bucket.names]
        gradients = [p.grad for p in members if p.grad is not None]
        assert len(gradients) == len(members), f"no gradient: {bucket.names}"
        flat = packed(gradients, members)
        started.append((members, flat, transport.start_sum(flat, ranks)))
    for members, flat, delivery in started:
        delivery()
        for parameter, gradient in zip(members, unpacked(flat, members), strict=True):
            parameter.grad = gradient
