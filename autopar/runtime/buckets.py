"""Flat buckets: which parameters travel together, which replica updates each, and where it lies in a bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from autopar.ir import BUCKET_BYTES, DTYPE_BYTES, Weight

# Elements. Kernels read vectors of 16 bytes and matmuls want more: every parameter begins at a multiple of 256 bytes,
# also in a copy of two bytes an element.
ALIGNMENT = 128
WASTE = 1 / 16  # of a bucket's elements: how much padding ends the search for a better balanced one
LARGEST_WASTE = 1 / 8  # above it, and above SPARE_BYTES, a bucket's segments are summed one by one instead of padded
SPARE_BYTES = 8 * 2**20  # of padding: moving it takes as long as starting one more collective (25 µs over NVLink)
LARGEST_BYTES = 16 * BUCKET_BYTES  # of a bucket that no fewer parameters balance


@dataclass(frozen=True)
class FlatBucket:
    """Parameters of one dtype in one flat buffer, the segments of all owners one after the other.

    ``names`` are in the order of their place, which ``offsets`` tells; segment i is from ``bounds[i]`` to
    ``bounds[i + 1]``. Without owners there is one segment. ``copy_dtype`` is that of the copies which programs read, or
    empty where they read the parameters themselves.
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
    def segments(self) -> int:
        """One for each owner, or one for all."""
        return len(self.bounds) - 1

    @property
    def even(self) -> bool:
        """Whether all segments are of one length, so that one collective serves all owners."""
        return len({high - low for low, high in pairwise(self.bounds)}) == 1

    @property
    def longest(self) -> int:
        """Elements of the longest segment."""
        return max(high - low for low, high in pairwise(self.bounds))

    def segment(self, flat: torch.Tensor, owner: int) -> torch.Tensor:
        """An owner's part of a buffer."""
        return flat[self.bounds[owner] : self.bounds[owner + 1]]

    def owned(self, owner: int) -> tuple[str, ...]:
        """The parameters of an owner."""
        low, high = self.bounds[owner : owner + 2]
        return tuple(name for name, offset in zip(self.names, self.offsets, strict=True) if low <= offset < high)

    def views(self, flat: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each parameter's part of a buffer, with the shape and the memory order of its counterpart in ``like``."""
        places = zip(self.names, self.offsets, strict=True)
        return {name: laid_out(flat[k : k + like[name].numel()], like[name]) for name, k in places}


def order_of(tensor: torch.Tensor) -> list[int]:
    """A tensor's dims from the outermost in memory to the innermost."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def laid_out(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor with the shape and memory order of another one."""
    order = order_of(like)
    return flat.view([like.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.ndim)])


def aligned(numel: int) -> int:
    """Elements that a parameter takes up in a bucket."""
    return -(-max(numel, 1) // ALIGNMENT) * ALIGNMENT


def balanced(
    numel: Mapping[str, int], num_owners: int, known: Mapping[str, int], before: Sequence[int] = ()
) -> dict[str, int]:
    """Owners of some parameters: the largest first, each to the owner with the least so far.

    Args:
        known: owners that are given; their load counts.
        before: what each owner has of other buckets; it decides among those with equally little of this one.
    """
    before = before or [0] * num_owners
    load = [0] * num_owners
    for name in numel.keys() & known.keys():
        load[known[name]] += numel[name]
    owners = {name: known[name] for name in numel if name in known}
    for name in sorted(numel.keys() - known.keys(), key=lambda n: (-numel[n], n)):
        owners[name] = min(range(num_owners), key=lambda owner: (load[owner], before[owner]))
        load[owners[name]] += numel[name]
    return owners


def loads(numel: Mapping[str, int], owners: Mapping[str, int], num_owners: int) -> list[int]:
    """Elements of each owner."""
    load = [0] * num_owners
    for name, size in numel.items():
        load[owners[name]] += size
    return load


def wasted(numel: Mapping[str, int], owners: Mapping[str, int], num_owners: int) -> float:
    """What equal segments add to a bucket, as a part of what is in it."""
    return num_owners * max(loads(numel, owners, num_owners)) / sum(numel.values()) - 1


def grouped(weights: Sequence[Weight], num_owners: int, limit_bytes: int = BUCKET_BYTES) -> list[list[Weight]]:
    """Which of a rank's weights travel together, in the order in which a backward fills the groups: about the reverse
    of the model's.

    A group ends at ``limit_bytes``. Among several owners it goes on until its weights, each owned whole, can be shared
    out almost evenly, as those of a few repeated blocks can; where none can within `LARGEST_BYTES` (or two of the
    largest weight for each owner), the best one so far is taken.
    """
    classes: defaultdict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in reversed(weights):
        classes[weight.stored_dtype, weight.dtype].append(weight)
    place = {weight.name: i for i, weight in enumerate(reversed(weights))}
    groups = [group for alike in classes.values() for group in split(alike, num_owners, limit_bytes)]
    return sorted(groups, key=lambda group: place[group[-1].name])


def split(weights: Sequence[Weight], num_owners: int, limit_bytes: int) -> list[list[Weight]]:
    """Weights of one class, cut into groups."""
    element = DTYPE_BYTES[weights[0].stored_dtype]
    largest = max(LARGEST_BYTES, 2 * num_owners * max(w.stored_bytes for w in weights))
    groups: list[list[Weight]] = []
    rest = list(weights)
    while rest:
        best, least, numel = 0, float("inf"), {}
        for count, weight in enumerate(rest, start=1):
            numel[weight.name] = aligned(weight.numel)
            if num_owners == 1:
                if sum(numel.values()) * element > limit_bytes:
                    best = max(count - 1, 1)
                    break
                continue
            if sum(numel.values()) * element < limit_bytes:
                continue
            waste = wasted(numel, balanced(numel, num_owners, {}), num_owners)
            if waste < least:
                best, least = count, waste
            if least <= WASTE or sum(numel.values()) * element > largest:
                break
        else:
            best = best if num_owners > 1 and least <= LARGEST_WASTE else len(rest)
        groups.append(rest[:best])
        rest = rest[best:]
    return groups


def replica_owners(
    stages: Sequence[Sequence[Weight]], holders: Mapping[str, Sequence[int]], num_owners: int
) -> dict[str, int]:
    """Which replica updates each trainable weight: whole weights, balanced within every bucket of every stage.

    A weight that several stages hold has one owner on all of them.

    Args:
        stages: the weights that each stage holds, in the model's order.
        holders: the stages that hold each weight.
    """
    trained = [[weight for weight in own if weight.requires_grad] for own in stages]
    tied = {w.name: aligned(w.numel) for own in trained for w in own if len(holders.get(w.name, ())) > 1}
    owners = balanced(tied, num_owners, {})
    for own in trained:
        total = [0] * num_owners
        for group in grouped(own, num_owners):
            numel = {weight.name: aligned(weight.numel) for weight in group}
            owners |= balanced(numel, num_owners, owners, total)
            total = [a + b for a, b in zip(total, loads(numel, owners, num_owners), strict=True)]
    return owners


def flat_buckets(weights: Sequence[Weight], owners: Mapping[str, int], num_replicas: int) -> tuple[FlatBucket, ...]:
    """The buckets of a rank's trainable weights.

    Args:
        owners: of all of them, or empty where each replica updates every weight.
    """
    num_owners = num_replicas if owners else 1
    return tuple(placed(group, owners, num_owners) for group in grouped(weights, num_owners))


def placed(group: Sequence[Weight], owners: Mapping[str, int], num_owners: int) -> FlatBucket:
    """A group's bucket: padded to equal segments unless that would add too much."""
    numel = {weight.name: aligned(weight.numel) for weight in group}
    owner = {name: owners.get(name, 0) for name in numel}
    sizes = loads(numel, owner, num_owners)
    element = DTYPE_BYTES[group[0].stored_dtype]
    padding = num_owners * max(sizes) - sum(sizes)
    if padding <= LARGEST_WASTE * sum(sizes) or padding * element <= SPARE_BYTES:
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
