"""Tensor axes of a mesh: their names and sizes, and a shard's number on each.

One axis is called ``tp``. Several are called ``tp0``, ``tp1``, …, the outermost first. Shards of a tensor-parallel
group are numbered with the innermost axis fastest, so that its ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.layout import TP, AxisSizes


@dataclass(frozen=True)
class TensorAxis:
    """One axis.

    Args:
        ranks: number of ranks on it.
        stride: distance between two neighbours on it: the ranks of all axes inside.
    """

    name: str = TP
    ranks: int = 1
    stride: int = 1


TensorAxes = tuple[TensorAxis, ...]  # the outermost first; none where nothing is split
ONE_RANK = TensorAxis()


def num_ranks(axes: TensorAxes) -> int:
    """Ranks of a tensor-parallel group."""
    return prod(axis.ranks for axis in axes)


def mesh_axes(sizes: Sequence[int]) -> TensorAxes:
    """The axes of a tensor-parallel group of these sizes, the outermost first; none for a single rank."""
    return tensor_axes(axis_sizes(sizes)) if prod(sizes) > 1 else ()


def axis_sizes(sizes: Sequence[int]) -> AxisSizes:
    """Sizes of tensor axes by name."""
    return {TP: sizes[0]} if len(sizes) == 1 else {f"{TP}{number}": size for number, size in enumerate(sizes)}


def tensor_axes(ranks: AxisSizes) -> TensorAxes:
    """The axes of these sizes, the outermost first."""
    sizes = [*ranks.values()]
    return tuple(TensorAxis(name, size, prod(sizes[i + 1 :])) for i, (name, size) in enumerate(ranks.items()))


def axis_index(ranks: AxisSizes, shard: int) -> AxisSizes:
    """A shard's number on each axis."""
    index: dict[str, int] = {}
    for axis in reversed([*ranks]):
        shard, index[axis] = divmod(shard, ranks[axis])
    return index
