"""Which weights' gradients travel together, and which replica updates each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.ir.cost_graph import BUCKET_BYTES
from autopar.ir.graph import DTYPE_BYTES, Weight

# Elements. Kernels read vectors of 16 bytes and matmuls want more: every parameter begins at a multiple of 256 bytes,
# also in a copy of two bytes an element.
ALIGNMENT = 128
WASTE = 1 / 16  # of a bucket's elements: how much padding ends the search for a better balanced one
MAX_BUCKET_BYTES = 16 * BUCKET_BYTES  # of a bucket that no fewer parameters balance
MAX_WASTE = 1 / 8  # above it, and above SPARE_BYTES, a bucket's segments are summed one by one instead of padded


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
    out almost evenly, as those of a few repeated blocks can; where none can within `MAX_BUCKET_BYTES` (or two of the
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
    largest = max(MAX_BUCKET_BYTES, 2 * num_owners * max(w.stored_bytes for w in weights))
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
            best = best if num_owners > 1 and least <= MAX_WASTE else len(rest)
        groups.append(rest[:best])
        rest = rest[best:]
    return groups


def padded_bytes(weights: Sequence[Weight], num_owners: int) -> int:
    """Size of the largest bucket of some weights, all segments counted as long as its longest, byte.

    Args:
        num_owners: replicas that share out the updates, or 1.
    """
    largest = 0
    for group in grouped(weights, num_owners):
        numel = {weight.name: aligned(weight.numel) for weight in group}
        longest = max(loads(numel, balanced(numel, num_owners, {}), num_owners))
        largest = max(largest, longest * num_owners * DTYPE_BYTES[group[0].stored_dtype])
    return largest
