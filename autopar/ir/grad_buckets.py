"""Buckets of weights, and the replica that updates each weight.

Under ZeRO-1 and -2 every replica owns whole parameters, so that optimizers that need a parameter's norm stay right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from autopar.ir.comm_sizes import round_up
from autopar.ir.cost_graph import BUCKET_BYTES
from autopar.ir.graph import DTYPE_BYTES, Weight

# Elements. Kernels read vectors of 16 bytes and matmuls want more: every parameter begins at a multiple of 256 bytes,
# also in a copy of two bytes an element.
PARAM_ALIGNMENT = 128
TARGET_PADDING_SHARE = 1 / 16  # padding by which a bucket's elements may grow; with less, a group is balanced enough
MAX_BUCKET_BYTES = 16 * BUCKET_BYTES  # size up to which a group grows in search of balance
# Flat buffers of a rank in which gradients travel between replicas while their buckets have no memory of their own: one
# that a backward fills, and one that is being reduced. Buckets take turns.
NUM_GRAD_SLOTS = 2
# Buffers of a rank in which blocks of parameters take turns under ZeRO-3: two that a compiled region reads, which may
# reach from one block into the next, and one that is being gathered.
NUM_PARAM_SLOTS = 3
# With a larger share and more bytes, a bucket's segments are not padded to one length.
MAX_PADDING_SHARE = 1 / 8
# Moving so much padding takes as long as starting one more collective: 25 µs over NVLink.
MAX_FREE_PADDING_BYTES = 8 * 2**20


def padded_numel(numel: int) -> int:
    """Elements that a parameter takes up in a bucket: its size rounded up to `PARAM_ALIGNMENT`."""
    return round_up(max(numel, 1), PARAM_ALIGNMENT)


def assign_owners(
    numel: Mapping[str, int], num_owners: int, fixed: Mapping[str, int], other_load: Sequence[int] = ()
) -> dict[str, int]:
    """The owner of each parameter: the largest parameters first, each to the owner with the fewest elements so far.

    Args:
        numel: elements of each parameter.
        fixed: owners that some parameters already have; their load counts.
        other_load: elements of each owner in other buckets. It decides among owners with equal load in this one.
    """
    other_load = other_load or [0] * num_owners
    load = [0] * num_owners
    for name in numel.keys() & fixed.keys():
        load[fixed[name]] += numel[name]
    owners = {name: fixed[name] for name in numel if name in fixed}
    least = [(load[owner], other_load[owner], owner) for owner in range(num_owners)]
    heapify(least)
    for name in sorted(numel.keys() - fixed.keys(), key=lambda n: (-numel[n], n)):
        size, other, owner = least[0]
        owners[name] = owner
        heapreplace(least, (size + numel[name], other, owner))
    return owners


def owner_loads(numel: Mapping[str, int], owners: Mapping[str, int], num_owners: int) -> list[int]:
    """Number of elements per owner."""
    load = [0] * num_owners
    for name, size in numel.items():
        load[owners[name]] += size
    return load


def is_padded(loads: Sequence[int], element_bytes: int) -> bool:
    """Whether a bucket's segments, with so many elements, are padded to one length."""
    padding = len(loads) * max(loads) - sum(loads)
    return padding <= MAX_PADDING_SHARE * sum(loads) or padding * element_bytes <= MAX_FREE_PADDING_BYTES


def num_collectives(group: Sequence[Weight], num_owners: int) -> int:
    """Collectives that move a bucket once, where a collective moves segments of one length: one, or one a segment."""
    numel = {weight.name: padded_numel(weight.numel) for weight in group}
    loads = owner_loads(numel, assign_owners(numel, num_owners, {}), num_owners)
    return 1 if is_padded(loads, DTYPE_BYTES[group[0].stored_dtype]) else sum(load > 0 for load in loads)


def group_weights(weights: Sequence[Weight], num_owners: int, limit_bytes: int = BUCKET_BYTES) -> list[list[Weight]]:
    """Groups of a rank's weights, one per bucket, in the order in which a backward fills them.

    That order is about the reverse of the model's. A group ends at ``limit_bytes``. With several owners it grows until
    its weights, each owned whole, can be divided almost evenly; those of a few repeated blocks can. If none can be
    divided within `MAX_BUCKET_BYTES` (or two of the largest weight for each owner), the best group so far is taken.
    """
    classes: defaultdict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in reversed(weights):
        classes[weight.stored_dtype, weight.dtype].append(weight)
    place = {weight.name: i for i, weight in enumerate(reversed(weights))}
    groups = [group for alike in classes.values() for group in split_weights(alike, num_owners, limit_bytes)]
    return sorted(groups, key=lambda group: place[group[-1].name])


def block_groups(
    weights: Sequence[Weight],
    blocks: Mapping[str, str],
    alike: Callable[[Weight], Hashable],
    limit_bytes: int = BUCKET_BYTES,
) -> list[list[Weight]]:
    """Groups of a rank's weights, one per bucket of ZeRO-3, in the order in which a backward fills them.

    A group is a block's weights of one pair of dtypes, or those of several blocks up to ``limit_bytes``.

    Args:
        blocks: block of each weight.
        alike: what else the weights of a group share.
    """
    place = {weight.name: i for i, weight in enumerate(reversed(weights))}
    classes: defaultdict[Hashable, dict[str, list[Weight]]] = defaultdict(dict)
    for weight in reversed(weights):
        kind = weight.stored_dtype, weight.dtype, alike(weight)
        classes[kind].setdefault(blocks[weight.name], []).append(weight)
    groups: list[list[Weight]] = []
    for by_block in classes.values():
        current: list[Weight] = []
        for block in by_block.values():
            if current and sum(w.stored_bytes for w in (*current, *block)) > limit_bytes:
                groups.append(current)
                current = []
            current = [*current, *block]
        groups.append(current)
    return sorted(groups, key=lambda group: place[group[-1].name])


def split_weights(weights: Sequence[Weight], num_owners: int, limit_bytes: int) -> list[list[Weight]]:
    """Weights of one pair of dtypes, cut into groups."""
    element = DTYPE_BYTES[weights[0].stored_dtype]
    most = max(MAX_BUCKET_BYTES, 2 * num_owners * max(w.stored_bytes for w in weights))
    numel = tuple(padded_numel(weight.numel) for weight in weights)
    ends = list(accumulate(group_lengths(numel, num_owners, limit_bytes / element, most / element)))
    return [list(weights[begin:end]) for begin, end in pairwise((0, *ends))]


@lru_cache(maxsize=1024)
def group_lengths(numel: tuple[int, ...], num_owners: int, limit: float, most: float) -> tuple[int, ...]:
    """Number of weights in each group, as `group_weights` cuts them.

    Args:
        numel: elements of the weights in order.
        limit, most: elements at which a group ends, and up to which it grows in search of balance.
    """
    lengths: list[int] = []
    begin = 0
    while begin < len(numel):
        best, least, total, largest = 0, float("inf"), 0, 0
        for end in range(begin + 1, len(numel) + 1):
            total, largest = total + numel[end - 1], max(largest, numel[end - 1])
            if num_owners == 1:
                if total > limit:
                    best = max(end - 1 - begin, 1)
                    break
                continue
            if total < limit:
                continue
            if num_owners * largest / total - 1 < least:  # else the longest segment, no shorter than this, is no better
                share = num_owners * longest_segment(numel[begin:end], num_owners) / total - 1
                if share < least:  # of padding, with equal segments
                    best, least = end - begin, share
            if least <= TARGET_PADDING_SHARE or total > most:
                break
        else:
            best = best if num_owners > 1 and least <= MAX_PADDING_SHARE else len(numel) - begin
        lengths.append(best)
        begin += best
    return tuple(lengths)


def longest_segment(numel: Iterable[int], num_owners: int) -> int:
    """Elements of the owner with most, as `assign_owners` divides parameters of so many elements."""
    loads = [0] * num_owners
    for size in sorted(numel, reverse=True):
        heapreplace(loads, loads[0] + size)
    return max(loads)


def bucket_sizes(weights: Sequence[Weight], num_owners: int) -> list[int]:
    """Bytes of each bucket of some weights, in order; every segment counts as long as the bucket's longest.

    Args:
        num_owners: replicas that divide the updates among them, or 1.
    """
    return [
        longest_segment((padded_numel(weight.numel) for weight in group), num_owners)
        * num_owners
        * DTYPE_BYTES[group[0].stored_dtype]
        for group in group_weights(weights, num_owners)
    ]


def slot_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the `NUM_GRAD_SLOTS` buffers in which buckets of these sizes take turns."""
    return sum(max(sizes[slot::NUM_GRAD_SLOTS], default=0) for slot in range(NUM_GRAD_SLOTS))
