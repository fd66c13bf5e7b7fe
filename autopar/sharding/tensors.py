"""Whole tensors cut into the parts of a layout, and parts joined: exact, so that state survives any mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from autopar.ir.layout import REPLICATED, AxisSizes, Layout, Split
from autopar.ir.mesh import Mesh
from autopar.ir.tensor_axes import axis_index

Index = Mapping[str, int]  # a rank's number on each axis


@dataclass(frozen=True)
class Box:
    """A box of a tensor that a rank stores.

    Args:
        whole: start in the whole tensor, per dim.
        part: start in the rank's part, per dim.
        sizes: size, per dim.
    """

    whole: tuple[int, ...]
    part: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def of_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view [*sizes] of the box in the rank's part, [*local]."""
        return narrowed(tensor, self.part, self.sizes)


def boxes(shape: Sequence[int], layout: Layout, ranks: AxisSizes, index: Index) -> list[Box]:
    """The boxes of a rank's part, as few as possible.

    A contiguous split has one box. A split of an inner digit of a dim has one for each value of the digits outside.

    Args:
        shape: of the whole tensor.
    """
    splits = splits_by_dim(layout)
    runs = [
        runs_of(held_indices(size, splits[dim], ranks, index)) if dim in splits else [(0, 0, size)]
        for dim, size in enumerate(shape)
    ]
    return [Box(tuple(r[0] for r in box), tuple(r[1] for r in box), tuple(r[2] for r in box)) for box in product(*runs)]


def boxes_of_piece(
    box: Box, like: torch.Tensor, elements: range, piece: torch.Tensor
) -> list[tuple[Box, torch.Tensor]]:
    """Boxes of a piece of a rank's part, as far as they lie in a box of the part, with their views in the piece.

    Args:
        like: tensor with the part's shape and strides.
        elements: of the part, counted in its memory order.
        piece: these elements, [len(elements)].
    """
    order = memory_order(like)
    sizes = [like.shape[dim] for dim in order]
    steps = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
    found: list[tuple[Box, torch.Tensor]] = []
    for begin, extent in ranges_as_boxes(sizes, elements.start, elements.stop):
        offset = sum(b * step for b, step in zip(begin, steps, strict=True)) - elements.start
        view = piece[offset : offset + prod(extent)].view(extent).permute([order.index(d) for d in range(like.ndim)])
        starts = [begin[order.index(dim)] for dim in range(like.ndim)]
        low = [max(s, part) for s, part in zip(starts, box.part, strict=True)]
        high = [min(s + n, part + size) for s, n, part, size in zip(starts, view.shape, box.part, box.sizes)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            whole = tuple(w + a - part for w, a, part in zip(box.whole, low, box.part, strict=True))
            inside = tuple(b - a for a, b in zip(low, high, strict=True))
            within = [a - s for a, s in zip(low, starts, strict=True)]
            found.append((Box(whole, tuple(low), inside), narrowed(view, within, inside)))
    return found


def ranges_as_boxes(sizes: Sequence[int], begin: int, end: int) -> list[tuple[list[int], list[int]]]:
    """(start, size) per dim of boxes that elements ``begin`` to before ``end`` of a contiguous tensor consist of."""
    if begin >= end:
        return []
    if len(sizes) == 1:
        return [([begin], [end - begin])]
    row = prod(sizes[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        parts = [(last, begin - last * row, end - last * row)]
    else:
        parts = [(first - 1, begin - (first - 1) * row, row)] if begin < first * row else []
        parts += [(last, 0, end - last * row)] if last * row < end else []
    boxes = [
        ([at, *start], [1, *size]) for at, low, high in parts for start, size in ranges_as_boxes(sizes[1:], low, high)
    ]
    if first < last:
        boxes.append(([first, *[0] * len(sizes[1:])], [last - first, *sizes[1:]]))
    return boxes


def runs_of(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first index, its position, length) of each stretch of consecutive ``indices`` [n], which ascend."""
    starts = [0, *(torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()] if len(indices) else []
    ends = [*starts[1:], len(indices)]
    return [(int(indices[start]), start, end - start) for start, end in zip(starts, ends)]


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Dims of a tensor, from the outermost in memory to the innermost."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def narrowed(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view [*sizes] of a box of a tensor."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def whole_shape(shape: Sequence[int], layout: Layout, ranks: AxisSizes) -> tuple[int, ...]:
    """The shape of the whole tensor of which a rank's part has this shape; inverse of `Layout.local_shape`.

    A ragged part does not tell.
    """
    assert not layout.ragged, f"parts as {layout} differ in size"
    sizes = list(shape)
    for split in layout.splits:
        sizes[split.dim] *= ranks[split.axis]
    return tuple(sizes)


def local_part(tensor: torch.Tensor, layout: Layout, ranks: AxisSizes, index: Index) -> torch.Tensor:
    """The part [*local] of a whole tensor [*shape] that the rank with this index stores; uncut dims stay whole.

    Partial layouts are our own bug here: a summand cannot be cut out.
    """
    assert not layout.partial, f"{layout} cannot be stored"
    for dim, splits in splits_by_dim(layout).items():
        tensor = tensor.index_select(dim, held_indices(tensor.shape[dim], splits, ranks, index).to(tensor.device))
    return tensor


def whole_tensor(parts: Iterable[tuple[Index, torch.Tensor]], layout: Layout, ranks: AxisSizes) -> torch.Tensor:
    """The whole tensor of its parts, one for each index on the axes that split it; inverse of `local_part`."""
    remaining = list(parts)
    for dim, splits in splits_by_dim(layout).items():
        axes = {split.axis for split in splits}
        groups: dict[frozenset[tuple[str, int]], list[tuple[Index, torch.Tensor]]] = {}
        for index, tensor in remaining:
            groups.setdefault(frozenset((a, i) for a, i in index.items() if a not in axes), []).append((index, tensor))
        remaining = [(dict(key), join_along_dim(members, dim, splits, ranks)) for key, members in groups.items()]
    return remaining[0][1]


def assembled(
    parts: Mapping[int, Mapping[str, torch.Tensor]], storage: Mapping[str, Layout], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, from the parts of each rank.

    Args:
        parts: tensors by rank and name.
        storage: layouts by name; names that are not listed are replicated.
    """
    shards_of: dict[str, dict[int, torch.Tensor]] = {}
    for rank, tensors in parts.items():
        for name, tensor in tensors.items():
            shards_of.setdefault(name, {})[mesh.place(rank).shard] = tensor
    return {
        name: whole_tensor(by_shard(shards, mesh), storage.get(name, REPLICATED), mesh.axis_sizes)
        for name, shards in shards_of.items()
    }


def summed_gradients(
    gradients: Mapping[int, Mapping[str, torch.Tensor]], storage: Mapping[str, Layout], mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Whole gradients by name, from the gradients of each rank's own replica, stage and shard.

    Gradients are summed over replicas and over the stages of a tied weight; over shards where each has a summand.
    """
    sums: dict[str, dict[int, torch.Tensor]] = {}
    for rank, own in gradients.items():
        shard = mesh.place(rank).shard
        for name, gradient in own.items():
            known = sums.setdefault(name, {})
            known[shard] = known[shard] + gradient if shard in known else gradient
    total: dict[str, torch.Tensor] = {}
    for name, own in sums.items():
        layout = storage.get(name, REPLICATED)
        total[name] = whole_tensor(summed_parts(by_shard(own, mesh), layout.partial_gradient), layout, mesh.axis_sizes)
    return total


def summed_parts(
    parts: Iterable[tuple[Index, torch.Tensor]], axes: Collection[str]
) -> list[tuple[Index, torch.Tensor]]:
    """The parts of a tensor, summed over some axes, by their index on the others."""
    groups: dict[tuple[tuple[str, int], ...], list[torch.Tensor]] = {}
    for index, tensor in parts:
        groups.setdefault(tuple((a, i) for a, i in index.items() if a not in axes), []).append(tensor)
    return [(dict(key), torch.stack(members).sum(0)) for key, members in groups.items()]


def by_shard(tensors: Mapping[int, torch.Tensor], mesh: Mesh) -> list[tuple[Index, torch.Tensor]]:
    """(index on the tensor axes, tensor) of each shard, by shard."""
    return [(axis_index(mesh.axis_sizes, shard), tensors[shard]) for shard in sorted(tensors)]


def join_along_dim(
    members: Sequence[tuple[Index, torch.Tensor]], dim: int, splits: Sequence[Split], ranks: AxisSizes
) -> torch.Tensor:
    """The tensor of parts that differ along one dim."""
    count = prod(ranks[split.axis] for split in splits)
    assert len(members) == count, f"{len(members)} parts of {count}"
    shape = list(members[0][1].shape)
    shape[dim] = sum(tensor.shape[dim] for _, tensor in members)
    result = members[0][1].new_empty(shape)
    for index, tensor in members:
        result.index_copy_(dim, held_indices(shape[dim], splits, ranks, index).to(tensor.device), tensor)
    return result


def held_indices(size: int, splits: Sequence[Split], ranks: AxisSizes, index: Index) -> torch.Tensor:
    """The indices of a whole dim that a rank stores, in order: each split takes its part of those before it."""
    indices = torch.arange(size, device="cpu")
    for split in splits:
        count = ranks[split.axis]
        assert split.fits(len(indices), count), f"{split} of a dim of {len(indices)}"
        part = split.part(len(indices), count, index[split.axis])
        indices = indices.view(split.outer, len(indices) // split.outer)[:, part.start : part.stop].flatten()
    return indices


def splits_by_dim(layout: Layout) -> dict[int, list[Split]]:
    """The splits of each dim that has any."""
    splits: dict[int, list[Split]] = {}
    for split in layout.splits:
        splits.setdefault(split.dim, []).append(split)
    return splits


def with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor if it lies in memory with these strides, else a copy that does."""
    if all(size == 1 or own == asked for size, own, asked in zip(tensor.shape, tensor.stride(), stride, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, without a gradient."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
