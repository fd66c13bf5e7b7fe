"""Flat buckets: which parameters share a flat buffer, which replica updates each, and where each lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from autopar.ir.grad_buckets import assign_owners, group_weights, is_padded, owner_loads, padded_numel
from autopar.ir.graph import DTYPE_BYTES, Weight


@dataclass(frozen=True)
class FlatBucket:
    """Parameters of one dtype in one flat buffer, with one segment per owner.

    Args:
        names: parameters in their order in the buffer.
        offsets: first element of each parameter.
        bounds: segment i is elements ``bounds[i]`` to ``bounds[i + 1]``. Without owners there is one segment.
        dtype: of the parameters and their main grads.
        copy_dtype: of the copies that programs read, or None where they read the parameters themselves.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]
    dtype: torch.dtype
    copy_dtype: torch.dtype | None

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

    def names_of(self, owner: int) -> tuple[str, ...]:
        """Names of an owner's parameters."""
        low, high = self.bounds[owner : owner + 2]
        return tuple(name for name, offset in zip(self.names, self.offsets, strict=True) if low <= offset < high)

    def views(self, flat: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """View of each parameter in a buffer, with the shape and memory order of its counterpart in ``like``."""
        places = zip(self.names, self.offsets, strict=True)
        return {name: view_like(flat[k : k + like[name].numel()], like[name]) for name, k in places}

    def owned_views(
        self, segment: torch.Tensor, owner: int, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As `views`, of an owner's parameters in its segment."""
        starts = {name: k - self.bounds[owner] for name, k in zip(self.names, self.offsets, strict=True)}
        owned = {name: starts[name] for name in self.names_of(owner)}
        return {name: view_like(segment[k : k + like[name].numel()], like[name]) for name, k in owned.items()}


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Dims of a tensor, from the outermost in memory to the innermost."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


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


def make_bucket(group: Sequence[Weight], owners: Mapping[str, int], num_owners: int) -> FlatBucket:
    """Bucket of a group of weights, padded to equal segments unless the padding would be too large."""
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
    dtype, copy_dtype = group[0].stored_dtype, group[0].dtype if group[0].master else ""
    return FlatBucket(
        tuple(names),
        tuple(offsets),
        tuple(bounds),
        getattr(torch, dtype),
        getattr(torch, copy_dtype) if copy_dtype else None,
    )
