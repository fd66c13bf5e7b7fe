"""Flat buckets: parameters that share a flat buffer, where each lies, and which elements a replica updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from autopar.ir.comm_sizes import round_up
from autopar.ir.grad_buckets import (
    PARAM_ALIGNMENT,
    assign_owners,
    block_groups,
    group_weights,
    is_padded,
    owner_loads,
    padded_numel,
)
from autopar.ir.graph import DTYPE_BYTES, Weight
from autopar.sharding.tensors import memory_order


@dataclass(frozen=True)
class FlatBucket:
    """Parameters of one dtype in one flat buffer, with one segment per replica that updates some of them.

    Args:
        names: parameters in their order in the buffer.
        numels: elements of each parameter.
        offsets: first element of each parameter.
        bounds: segment i is elements ``bounds[i]`` to ``bounds[i + 1]``. Where every replica updates all, there is one.
        dtype: of the parameters and their main grads.
        copy_dtype: of the copies that programs read, or None where they read the parameters themselves.
        is_kept: whether the gathered parameters stay allocated; otherwise they are gathered before each use (ZeRO-3).
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]
    dtype: torch.dtype
    copy_dtype: torch.dtype | None
    is_kept: bool = True

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the main grads."""
        return self.numel * self.dtype.itemsize

    @property
    def num_segments(self) -> int:
        """Number of segments: one per owner, or 1."""
        return len(self.bounds) - 1

    @property
    def even(self) -> bool:
        """Whether all segments have one length, so that one collective serves all owners."""
        return len({high - low for low, high in pairwise(self.bounds)}) == 1

    @property
    def longest_segment(self) -> int:
        """Elements of the longest segment."""
        return max(high - low for low, high in pairwise(self.bounds))

    def segments(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a buffer's segments, by owner."""
        return [flat[low:high] for low, high in pairwise(self.bounds)]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of what programs read."""
        return self.copy_dtype or self.dtype

    def pieces(self, owner: int) -> dict[str, range]:
        """Elements of each parameter that lie in an owner's segment, counted in the parameter's memory order."""
        low, high = self.bounds[owner : owner + 2]
        found: dict[str, range] = {}
        for name, numel, offset in zip(self.names, self.numels, self.offsets, strict=True):
            begin, end = max(low, offset), min(high, offset + numel)
            if begin < end or (numel == 0 and low <= offset < high):
                found[name] = range(begin - offset, end - offset)
        return found

    def views(self, flat: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """View of each parameter in a buffer, with the shape and memory order of its counterpart in ``like``."""
        places = zip(self.names, self.numels, self.offsets, strict=True)
        return {name: view_like(flat[k : k + numel], like[name]) for name, numel, k in places}

    def owned_views(
        self, segment: torch.Tensor, owner: int, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """View of each of an owner's `pieces` in its segment: as in `views` where a parameter lies there whole, else
        flat."""
        starts = {name: k - self.bounds[owner] for name, k in zip(self.names, self.offsets, strict=True)}
        found: dict[str, torch.Tensor] = {}
        for name, elements in self.pieces(owner).items():
            flat = segment[starts[name] + elements.start :][: len(elements)]
            found[name] = view_like(flat, like[name]) if len(elements) == like[name].numel() else flat
        return found


def piece_of(tensor: torch.Tensor, elements: range, like: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor, counted in the memory order of ``like``: flat, or the tensor itself if they are all."""
    if len(elements) == tensor.numel():
        return tensor
    return tensor.permute(memory_order(like)).reshape(-1)[elements.start : elements.stop]


def view_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View of ``flat`` [like.numel()] with the shape and memory order of ``like``."""
    order = memory_order(like)
    return flat.view([like.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.ndim)])


def replica_owners(
    stages: Sequence[Sequence[Weight]], holders: Mapping[str, Sequence[int]], num_owners: int
) -> dict[str, int]:
    """Replica that updates each trainable weight, balanced within every bucket of every stage.

    A replica owns whole weights, so optimizers that need a parameter's norm stay right. A weight that several stages
    hold has one owner on all of them.

    Args:
        stages: weights of each stage, in the model's order.
        holders: stages that hold each weight.
    """
    trained = [[weight for weight in stage if weight.requires_grad] for stage in stages]
    tied = {w.name: padded_numel(w.numel) for stage in trained for w in stage if len(holders.get(w.name, ())) > 1}
    owners = assign_owners(tied, num_owners, {})
    for stage in trained:
        total = [0] * num_owners
        for group in group_weights(stage, num_owners):
            numel = {weight.name: padded_numel(weight.numel) for weight in group}
            owners |= assign_owners(numel, num_owners, owners, total)
            total = [a + b for a, b in zip(total, owner_loads(numel, owners, num_owners), strict=True)]
    return owners


def flat_buckets(weights: Sequence[Weight], owners: Mapping[str, int], num_replicas: int) -> tuple[FlatBucket, ...]:
    """Buckets of a rank's trainable weights.

    Args:
        owners: owner of each weight; empty where every replica updates all weights.
    """
    num_owners = num_replicas if owners else 1
    return tuple(make_bucket(group, owners, num_owners) for group in group_weights(weights, num_owners))


def block_buckets(
    weights: Sequence[Weight],
    blocks: Mapping[str, str],
    kept: Collection[str],
    owners: Mapping[str, int],
    num_replicas: int,
) -> tuple[FlatBucket, ...]:
    """Buckets of a rank's trainable weights under ZeRO-3: blocks of parameters, whose elements replicas share evenly.

    Args:
        blocks: block of each weight.
        kept: weights whose gathered values stay allocated.
        owners: owner of each weight that is not cut.
    """
    made: list[FlatBucket] = []
    for group in block_groups(weights, blocks, lambda weight: (weight.name in kept, weight.name in owners)):
        first = group[0].name
        bucket = make_bucket(group, owners, num_replicas) if first in owners else even_bucket(group, num_replicas)
        made.append(replace(bucket, is_kept=first in kept))
    return tuple(made)


def even_bucket(group: Sequence[Weight], num_owners: int) -> FlatBucket:
    """Bucket of a group of weights in equal segments, which begin anywhere within a weight."""
    numels = [weight.numel for weight in group]
    offsets = [0, *accumulate(padded_numel(numel) for numel in numels)]
    segment = round_up(-(-offsets.pop() // num_owners), PARAM_ALIGNMENT)
    bounds = tuple(segment * owner for owner in range(num_owners + 1))
    return bucket_of(group, tuple(weight.name for weight in group), tuple(numels), tuple(offsets), bounds)


def make_bucket(group: Sequence[Weight], owners: Mapping[str, int], num_owners: int) -> FlatBucket:
    """Bucket of a group of weights that have whole owners, padded to equal segments unless that would be too large."""
    numel = {weight.name: padded_numel(weight.numel) for weight in group}
    owner = {name: owners.get(name, 0) for name in numel}
    sizes = owner_loads(numel, owner, num_owners)
    if is_padded(sizes, DTYPE_BYTES[group[0].stored_dtype]):
        sizes = [max(sizes)] * num_owners
    bounds = [0, *accumulate(sizes)]
    names = sorted(numel, key=owner.__getitem__)  # stable: within a segment the order of a backward
    free, offsets = bounds[:-1].copy(), []
    for name in names:
        offsets.append(free[owner[name]])
        free[owner[name]] += numel[name]
    numels = {weight.name: weight.numel for weight in group}
    return bucket_of(group, tuple(names), tuple(numels[n] for n in names), tuple(offsets), tuple(bounds))


def bucket_of(
    group: Sequence[Weight], names: tuple[str, ...], numels: tuple[int, ...], offsets: tuple[int, ...],
    bounds: tuple[int, ...],
) -> FlatBucket:  # fmt: skip
    """Bucket with the dtypes of a group's weights."""
    copy_dtype = getattr(torch, group[0].dtype) if group[0].master else None
    return FlatBucket(names, numels, offsets, bounds, getattr(torch, group[0].stored_dtype), copy_dtype)
