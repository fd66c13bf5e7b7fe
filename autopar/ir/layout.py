"""How a tensor lies on the ranks of a mesh axis: split, replicated, a partial sum, or with partial gradients.

A split is kept per factor of a dim, not per dim: a dim of size D is read as (outer, ranks, rest), and a rank holds its
part of the middle factor. ``outer`` 1 is a contiguous part. Rows of a fused query, key and value weight [3·h·d, c] are
split by heads with ``outer`` 3. In other words, a split is one digit of the dim's index in mixed radix. Several axes
can split one dim, each at another digit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TP = "tp"
AxisSizes = Mapping[str, int]


@dataclass(frozen=True, order=True)
class Split:
    """One mesh axis over one dim: rank i of n holds the indices j with (j // (D / (outer · n))) % n == i."""

    dim: int
    outer: int = 1
    axis: str = TP

    def fits(self, size: int, ranks: int) -> bool:
        """Whether a dim of this size divides evenly."""
        return size % (self.outer * ranks) == 0


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
        """Whether every split of a tensor of this shape is even."""
        return all(s.dim < len(shape) and s.fits(shape[s.dim], ranks[s.axis]) for s in self.splits)

    def local_shape(self, shape: Sequence[int], ranks: AxisSizes) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of ``shape``."""
        local = list(shape)
        for split in self.splits:
            assert local[split.dim] % ranks[split.axis] == 0, f"{self} of {list(shape)}"
            local[split.dim] //= ranks[split.axis]
        return tuple(local)

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes on which the tensor is not replicated."""
        return frozenset((*(split.axis for split in self.splits), *self.partial, *self.partial_gradient))

    def __str__(self) -> str:
        """As `Layout.parse` reads it: ``tp:0`` (dim 0), ``tp:0x3`` (dim 0 in 3 parts), ``tp:sum``, ``tp:gradient``."""
        words = [f"{s.axis}:{s.dim}" + (f"x{s.outer}" if s.outer > 1 else "") for s in self.splits]
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
            match = re.fullmatch(r"(\w+):(?:(\d+)(?:x([1-9]\d*))?|(sum|gradient))", word)
            if match is None:
                raise ValueError(f"{word!r} is no layout; write {TP}:DIM, {TP}:DIMxPARTS, {TP}:sum or {TP}:gradient")
            axis, dim, outer, kind = match.groups()
            if kind is None:
                splits.append(Split(int(dim), int(outer or 1), axis))
            else:
                (partial if kind == "sum" else gradient).append(axis)
        return Layout(tuple(splits), tuple(partial), tuple(gradient))


REPLICATED = Layout()


def split_layout(dim: int, outer: int = 1, axis: str = TP) -> Layout:
    """The layout of a tensor that is split over one axis."""
    return Layout((Split(dim, outer, axis),))


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
        names: all names for which the table can be read.
    """
    entries: dict[str, set[str | None]] = {}
    for name in names:
        entries.setdefault(pattern_of(name), set()).add(table.get(name))
    short: dict[str, str] = {}
    for name, text in table.items():
        pattern = pattern_of(name)
        short[pattern if len(entries[pattern]) == 1 else name] = text
    return short
