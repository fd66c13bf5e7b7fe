"""A generated kernel: the operations that it computes, and the tensors that it reads and writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Place = tuple[int, int]  # region, and number of external operations on the way there


@dataclass(frozen=True)
class Access:
    """A kernel's access to an operand or result of the operation ``op``, or to its gradient.

    Args:
        times: passes over the tensor, times bytes of its elements in the kernel's memory over its own.
        is_transposed: whether elements that are neighbours for the kernel lie apart in memory.
    """

    op: str
    tensor: str
    times: float = 1
    is_transposed: bool = False


@dataclass(frozen=True)
class FusedKernel:
    """One generated kernel: operations that it computes, in order, with its accesses to memory."""

    direction: Direction
    ops: tuple[str, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]

    @property
    def accesses(self) -> tuple[Access, ...]:
        return self.reads + self.writes

    def __str__(self) -> str:
        return f"{self.direction} {' '.join(self.ops)}: reads {len(self.reads)}, writes {len(self.writes)}"


@dataclass
class Draft:
    """A kernel while kernels are merged, with accesses by what is accessed. ``size`` are elements of one result."""

    place: Place
    size: int
    ops: set[str] = field(default_factory=set)
    reads: dict[tuple[tuple, str], Access] = field(default_factory=dict)
    writes: dict[tuple, Access] = field(default_factory=dict)

    def add_read(self, key: tuple, access: Access, part: str = "") -> None:
        """Add an access; of several to one part of a tensor, the one with most passes counts."""
        if (key, part) not in self.reads or self.reads[key, part].times < access.times:
            self.reads[key, part] = access

    @property
    def read_keys(self) -> set[tuple]:
        return {key for key, _ in self.reads}

    def may_merge(self, other: Draft) -> bool:
        """Whether two kernels of one place become one: one reads what the other one writes, or both the same."""
        if self.read_keys & other.writes.keys() or other.read_keys & self.writes.keys():
            return True
        return self.size == other.size and bool(self.read_keys & other.read_keys)

    def merge(self, other: Draft) -> None:
        """Take over the work of another kernel."""
        self.size = max(self.size, other.size)
        self.ops |= other.ops
        self.writes |= other.writes
        for (key, part), access in other.reads.items():
            self.add_read(key, access, part)


def merged_kernels(drafts: Iterable[Draft], direction: Direction, position: Mapping[str, int]) -> Iterator[FusedKernel]:
    """Kernels after all merges. What a kernel itself writes, it does not read.

    Args:
        position: index of each operation in the graph.
    """
    by_place: defaultdict[Place, list[Draft]] = defaultdict(list)
    for draft in drafts:
        near = by_place[draft.place]
        for other in [o for o in near if o.may_merge(draft)]:
            near.remove(other)
            draft.merge(other)
        near.append(draft)
    for draft in (draft for near in by_place.values() for draft in near):
        reads = tuple(access for (key, _), access in draft.reads.items() if key not in draft.writes)
        ops = tuple(sorted(draft.ops, key=position.__getitem__))
        yield FusedKernel(direction, ops, reads, tuple(draft.writes.values()))
