"""How a tensor lies on the ranks of the tensor axes: split, replicated, a partial sum, or with partial gradients.

A split is kept per factor of a dim, not per dim: a dim of size D is read as (outer, ranks, rest), and a rank holds its
part of the middle factor. ``outer`` 1 is a contiguous part. Rows of a fused query, key and value weight [3·h·d, c] are
split by heads with ``outer`` 3. In other words, a split is one digit of the dim's index in mixed radix.

On several axes each split divides the part that the splits before it leave, the outermost axis first. So several axes
can split one dim, and all that holds for one axis holds for the next one, with parts in place of whole tensors.

A ragged split has a ``unit``: the dim is read as (outer, count, unit), and the ranks share ``count`` out. The first
``count % ranks`` ranks hold one unit more than the others, so that the first rank's part is the largest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

TP = "tp"
AxisSizes = Mapping[str, int]  # number of ranks of each axis, the outermost first; or a rank's number on each
FIRST: AxisSizes = {}  # the first rank of every axis


def part_of(size: int, unit: int, ranks: int, rank: int) -> range:
    """The positions in a block that a rank holds: ``size // unit`` units are shared out, the first ranks get more."""
    units, extra = divmod(size // unit if unit else 0, ranks)
    start = units * rank + min(rank, extra)
    return range(start * unit, (start + units + (rank < extra)) * unit)


@dataclass(frozen=True, order=True)
class Split:
    """One mesh axis over one dim: rank i of n holds the indices j with (j // (D / (outer · n))) % n == i.

    Args:
        unit: consecutive elements that a ragged split keeps together; 0 for a split into equal parts.
    """

    dim: int
    outer: int = 1
    axis: str = TP
    unit: int = 0

    def fits(self, size: int, ranks: int) -> bool:
        """Whether a dim of this size divides evenly, or, if ragged, has a unit for every rank."""
        if self.unit:
            return size % (self.outer * self.unit) == 0 and size // (self.outer * self.unit) >= ranks
        return size % (self.outer * ranks) == 0

    def part(self, size: int, ranks: int, rank: int) -> range:
        """A rank's positions in each of the ``outer`` blocks of a dim of this size."""
        return part_of(size // self.outer, self.unit or size // (self.outer * ranks), ranks, rank)

    def local_size(self, size: int, ranks: int, rank: int) -> int:
        """Number of a rank's positions of a dim of this size."""
        return self.outer * len(self.part(size, ranks, rank))


@dataclass(frozen=True)
class Layout:
    """Layout of one tensor on the mesh axes on which it is not replicated.

    Args:
        partial: axes whose ranks hold summands; the tensor is their sum.
        partial_gradient: axes whose ranks hold equal copies with summands of the gradient, because each rank reads its
            copy together with data that only this rank has.
    """

    splits: tuple[Split, ...] = ()
    partial: tuple[str, ...] = ()
    partial_gradient: tuple[str, ...] = ()

    def fits(self, shape: Sequence[int], ranks: AxisSizes) -> bool:
        """Whether every split fits what the splits before it leave of a tensor of this shape, see `Split.fits`."""
        local = list(shape)
        for split in self.splits:
            if split.dim >= len(shape) or not split.fits(local[split.dim], ranks[split.axis]):
                return False
            local[split.dim] = split.local_size(local[split.dim], ranks[split.axis], 0)
        return True

    def local_shape(self, shape: Sequence[int], ranks: AxisSizes, index: AxisSizes = FIRST) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of ``shape``.

        Args:
            index: the rank's number on each axis. Default: the first rank, whose part is the largest.
        """
        local = list(shape)
        for split in self.splits:
            count, size = ranks[split.axis], local[split.dim]
            assert split.fits(size, count), f"{self} of {list(shape)}"
            local[split.dim] = split.local_size(size, count, index.get(split.axis, 0))
        return tuple(local)

    def on(self, axis: str) -> Layout:
        """The layout on one axis alone."""
        splits = tuple(split for split in self.splits if split.axis == axis)
        partial, gradient = ((axis,) if axis in axes else () for axes in (self.partial, self.partial_gradient))
        return Layout(splits, partial, gradient)

    def then(self, inner: Layout) -> Layout:
        """The layout of a tensor whose parts lie as ``inner`` on further axes."""
        return Layout(
            self.splits + inner.splits, self.partial + inner.partial, self.partial_gradient + inner.partial_gradient
        )

    def largest_share(self, shape: Sequence[int], ranks: AxisSizes) -> float:
        """The largest part of a tensor of ``shape``, as a share of the whole."""
        return prod(self.local_shape(shape, ranks)) / max(1, prod(shape))

    @property
    def ragged(self) -> bool:
        """Whether parts may differ in size."""
        return any(split.unit for split in self.splits)

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes on which the tensor is not replicated."""
        return frozenset((*(split.axis for split in self.splits), *self.partial, *self.partial_gradient))

    def __str__(self) -> str:
        """As `Layout.parse` reads it: ``tp:0`` (dim 0), ``tp:0x3`` (dim 0 in 3 parts), ``tp:sum``, ``tp:gradient``.

        A ragged split ends with its unit: ``tp:1@1``, ``tp:0x3@64``.
        """
        words = [
            f"{s.axis}:{s.dim}" + (f"x{s.outer}" if s.outer > 1 else "") + (f"@{s.unit}" if s.unit else "")
            for s in self.splits
        ]
        words += [f"{axis}:sum" for axis in self.partial] + [f"{axis}:gradient" for axis in self.partial_gradient]
        return " ".join(words) or "replicated"

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout in a text.

        Raises:
            ValueError: the text is no layout.
        """
        splits, partial, gradient = [], [], []
        for word in text.split() if text != "replicated" else ():
            match = re.fullmatch(r"(\w+):(?:(\d+)(?:x([1-9]\d*))?(?:@([1-9]\d*))?|(sum|gradient))", word)
            if match is None:
                raise ValueError(
                    f"{word!r} is no layout; write {TP}:DIM, {TP}:DIMxPARTS, {TP}:DIM@UNIT, {TP}:sum or {TP}:gradient"
                )
            axis, dim, outer, unit, kind = match.groups()
            if kind is None:
                splits.append(Split(int(dim), int(outer or 1), axis, int(unit or 0)))
            else:
                (partial if kind == "sum" else gradient).append(axis)
        return Layout(tuple(splits), tuple(partial), tuple(gradient))


REPLICATED = Layout()


def split_layout(dim: int, outer: int = 1, axis: str = TP, unit: int = 0) -> Layout:
    """The layout of a tensor that is split over one axis."""
    return Layout((Split(dim, outer, axis, unit),))


def partial_layout(axis: str = TP) -> Layout:
    """The layout of a tensor that is the sum over one axis."""
    return Layout(partial=(axis,))


def broadcast_layout(axis: str = TP) -> Layout:
    """The layout of a replicated tensor whose gradients are still to be summed over one axis."""
    return Layout(partial_gradient=(axis,))


def pattern_of(name: str) -> str:
    """A name with ``*`` for every number in its path; all repetitions of a block have one pattern."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def look_up(table: Mapping[str, str], name: str) -> str | None:
    """The entry of a table of names and patterns for a name; the name itself outranks its pattern."""
    return table.get(name, table.get(pattern_of(name)))


def compressed(table: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """A table with patterns in place of names, where all ``names`` that fit a pattern have one entry.

    Args:
        names: all names for which the table can be read, its own included.
    """
    entries: dict[str, set[str | None]] = {}
    for name in names:
        entries.setdefault(pattern_of(name), set()).add(table.get(name))
    short: dict[str, str] = {}
    for name, text in table.items():
        pattern = pattern_of(name)
        short[pattern if len(entries[pattern]) == 1 else name] = text
    return short
