"""Activation checkpointing: where segments begin.

A segment is a run of operations whose backward runs their forward again. It keeps the tensors that enter it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost.ops.op_stats import GraphStats, storage_names
from autopar.ir.graph import Graph, Ref

Matrix = NDArray[np.int64]

# Candidate starts that are considered; of more, every second (third, …) one. ViT-L/16 has 175, DenseNet-201 has 205.
MAX_POSITIONS = 400
# How far the memory of the chosen segments may exceed the minimum, relative.
MAX_EXCESS = 0.005


@dataclass(frozen=True)
class Lifetime:
    """Lifetime of a storage: indices of the operations that make it (-1 for an input), read it last, save it first."""

    num_bytes: int
    made_at: int
    last_read_at: int
    saved_at: int | None


@dataclass(frozen=True)
class Segmentation:
    """Segments that begin at ``starts``, the bytes kept at their boundaries, and the bytes of the largest segment."""

    starts: tuple[int, ...]
    boundary_bytes: int
    largest_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.boundary_bytes + self.largest_bytes


def segment_starts(graph: Graph, stats: GraphStats) -> tuple[int, ...]:
    """Indices of the operations that each begin a segment, for least memory.

    Memory is the boundary bytes of the whole model plus the saved bytes of the largest segment. A segment keeps the
    tensors that enter it. While it runs again, all tensors that its operations save are allocated. The first stage of
    a 1F1B pipeline has as many microbatches in flight as there are stages, so that it keeps as much as one microbatch
    keeps on all stages. The result depends on the graph and its statistics alone: all ranks find the same segments.

    Segments begin where few bytes are alive: at local minima. Operations that update the same memory in place share a
    segment. Operations up to the last one that writes into an input belong to no segment.

    Error: at most `MAX_EXCESS` above the minimum for these candidates. With gpipe, or fewer microbatches than stages,
        boundary bytes weigh more or less, and somewhat larger or smaller segments would be better.
    """
    alive = lifetimes(graph, stats)
    places = candidate_starts(graph, stats, alive)
    if len(places) == 1:
        return tuple(places[:-1])
    kept, saved = interval_bytes(graph, stats, alive, places)
    return tuple(places[k] for k in choose_segments(kept, saved).starts)


# -- candidate starts and the bytes between them -------------------------------------------------------------------


def lifetimes(graph: Graph, stats: GraphStats) -> Mapping[str, Lifetime]:
    """Lifetime of each storage by the name of the first value in it: inputs and values, without weights."""
    root = storage_names(graph, stats)
    made = {value.name: -1 for value in graph.inputs}
    made |= {v.name: i for i, op in enumerate(graph.ops) for v in op.outputs if v.name not in root}
    last, saved = dict(made), dict[str, int]()
    for i, op in enumerate(graph.ops):
        op_stats = stats.ops[op.name]
        for name in op.reads:
            last[root.get(name, name)] = i
        for name in op_stats.saved_names(op):
            saved.setdefault(root.get(name, name), i)
    values = graph.values
    return {name: Lifetime(values[name].num_bytes, i, last[name], saved.get(name)) for name, i in made.items()}


def candidate_starts(graph: Graph, stats: GraphStats, alive: Mapping[str, Lifetime]) -> list[int]:
    """Indices at which a segment may begin, in order. One must begin at the first; the last is the graph's end."""
    size, place = len(graph.ops), {op.name: i for i, op in enumerate(graph.ops)}
    first = first_start(graph, stats)
    steps = np.zeros(size + 2, dtype=np.int64)
    for life in alive.values():
        steps[life.made_at + 1] += life.num_bytes
        steps[max(life.made_at, life.last_read_at) + 1] -= life.num_bytes
    crossing = steps.cumsum()
    inside_colocated = np.zeros(size + 2, dtype=np.int64)
    for names in graph.colocated:
        inside_colocated[min(place[n] for n in names) + 1] += 1
        inside_colocated[max(place[n] for n in names) + 1] -= 1
    open_ = [i for i in np.flatnonzero(inside_colocated.cumsum()[:size] == 0).tolist() if i > first]
    around = [size, *open_, size]
    crossing[size] = np.iinfo(np.int64).max
    minima = [
        start
        for before, start, after in zip(around, around[1:], around[2:])
        if crossing[start] <= crossing[before] and crossing[start] <= crossing[after]
    ]
    minima = minima[:: -(-len(minima) // MAX_POSITIONS)] if minima else minima
    return [first, *minima, size] if first < size else [size]


def first_start(graph: Graph, stats: GraphStats) -> int:
    """Index after the last operation that writes into an input, which a second run would write twice."""
    root, inputs = storage_names(graph, stats), {value.name for value in graph.inputs}
    written = (
        i + 1
        for i, op in enumerate(graph.ops)
        if not op.outputs and isinstance(op.args[0], Ref) and root.get(op.args[0].name, op.args[0].name) in inputs
    )
    return max(written, default=0)


def interval_bytes(
    graph: Graph, stats: GraphStats, alive: Mapping[str, Lifetime], starts: Sequence[int]
) -> tuple[Matrix, Matrix]:
    """Bytes of every possible segment, as two matrices [end, start], both counted in candidate starts.

    Element [j, k] is about the segment of the operations from ``starts[k]`` to before ``starts[j]``. The first matrix
    holds the bytes that the segment makes and later operations read: boundary bytes. The second one holds the bytes
    that its operations save, which are allocated while it runs again.

    A storage counts for all segments that begin up to its maker and end within a range. These are a rectangle:

    ::

              k = 0      begins = number of starts up to ``made``
          j     +-----------+  <- first end at or after ``low``   : +bytes at its left corner, -bytes at its right one
          |     |  + bytes  |
          v     +-----------+  <- first end at or after ``high``  : -bytes at its left corner, +bytes at its right one

    Adding the four corners and then taking cumulative sums over both axes adds the bytes to each element of the
    rectangle. That takes O(storages + starts²) steps instead of O(storages · starts²).
    """
    size = len(starts)
    kept, saved = (np.zeros((size + 1, size + 1), dtype=np.int64) for _ in range(2))

    def add(corners: Matrix, num_bytes: int, made: int, low: int, high: int) -> None:
        """Add the corners for segments that begin at or before ``made`` and end in [``low``, ``high``)."""
        begins = bisect_right(starts, made)
        for end, sign in ((bisect_left(starts, low), 1), (bisect_left(starts, high), -1)):
            corners[end, 0] += sign * num_bytes
            corners[end, begins] -= sign * num_bytes

    beyond = len(graph.ops) + 1
    for life in alive.values():
        if life.made_at >= starts[0]:
            add(kept, life.num_bytes, life.made_at, life.made_at + 1, life.last_read_at + 1)
            if life.saved_at is not None:
                add(saved, life.num_bytes, life.made_at, life.saved_at + 1, beyond)
    for i, op in enumerate(graph.ops):
        if i >= starts[0]:
            add(saved, stats.ops[op.name].saved_bytes, i, i + 1, beyond)
    return tuple(m.cumsum(axis=0).cumsum(axis=1)[:size, :size] for m in (kept, saved))  # pyright: ignore


# -- the choice of segments ----------------------------------------------------------------------------------------


def choose_segments(kept: Matrix, saved: Matrix) -> Segmentation:
    """The segments of least memory, with ``starts`` as indices of candidate starts.

    Args:
        kept: boundary bytes [end, start], from `interval_bytes`.
        saved: saved bytes [end, start], from `interval_bytes`.

    Boundary bytes fall as the limit on the largest segment rises. No limit between two others is better than the upper
    one's boundary bytes plus the lower limit. This bound rules out most limits.
    """
    finest = max(int(saved[j, i]) for i, j in pairwise(range(len(saved))))
    best = whole = min_boundary_bytes(kept, saved, int(saved[-1, 0]))
    unexplored = [(finest, whole)]  # limits from the first entry to below the second entry's largest segment
    while unexplored:
        low, high = unexplored.pop()
        if low >= high.largest_bytes or high.boundary_bytes + low >= (1 - MAX_EXCESS) * best.num_bytes:
            continue
        middle = (low + high.largest_bytes) // 2
        found = min_boundary_bytes(kept, saved, middle)
        best = min(best, found, key=lambda choice: choice.num_bytes)
        unexplored += [(middle + 1, high), (low, found)]
    return best


def min_boundary_bytes(kept: Matrix, saved: Matrix, limit: int) -> Segmentation:
    """Segments of at most ``limit`` bytes each with the fewest boundary bytes, by a dynamic programme over ends.

    Ties go to the smallest largest segment.
    """
    size = len(kept)
    total, largest, previous = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for j in range(1, size):
        i = np.flatnonzero(saved[j, :j] <= limit)
        keeps = total[i] + kept[j, i]
        i = i[keeps == keeps.min()]
        peaks = np.maximum(largest[i], saved[j, i])
        previous[j] = i[peaks.argmin()]
        total[j], largest[j] = keeps.min(), peaks.min()
    starts = [int(previous[-1])]
    while starts[-1]:
        starts.append(int(previous[starts[-1]]))
    return Segmentation(tuple(reversed(starts)), int(total[-1]), int(largest[-1]))
