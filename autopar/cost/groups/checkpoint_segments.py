"""Where the segments of a model begin whose backward runs its forward again, and what they keep."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost.ops.op_cost import Pricing
from autopar.cost.ops.op_stats import GraphStats, storage_names
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph, Ref
from autopar.ir.hardware import Hardware

Matrix = NDArray[np.int64]

# Beginnings that are looked at; of more, every second (third, …) one. ViT-L/16 has 175, DenseNet-201 has 205.
MAX_POSITIONS = 400
# How far above the least memory the choice may be, relative.
MAX_EXCESS = 0.005


@dataclass(frozen=True)
class Lifetime:
    """A storage: the positions of the operations that make it (-1: an input), read it last, and save it first."""

    num_bytes: int
    made_at: int
    last_read_at: int
    saved_at: int | None


@dataclass(frozen=True)
class Segmentation:
    """Segments that begin at ``starts``, the bytes that stay between them and those of the largest one."""

    starts: tuple[int, ...]
    boundary_bytes: int
    largest_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.boundary_bytes + self.largest_bytes


def segment_starts(graph: Graph, stats: GraphStats) -> tuple[int, ...]:
    """Positions of the operations that each begin a segment, for least memory: what enters segments, and the largest.

    A segment keeps what it reads from before; while it runs again, everything comes back that its operations save. The
    first stage of a 1F1B pipeline has as many microbatches in flight as there are stages, so it keeps what one
    microbatch keeps on all of them: hence kept bytes of the whole model + saved bytes of the largest segment. So the
    choice depends on the graph and its facts alone, and all ranks that run the same graph choose alike.

    Segments begin where few bytes are alive: where neither neighbouring position has fewer. Operations that update the
    same memory in place share a segment; those up to the last one that writes into an input belong to none.

    Error: at most `TOLERANCE` above the least for these positions. With gpipe, or fewer microbatches than stages, kept
    bytes weigh more or less than they do here, and somewhat larger or smaller segments would be better.
    """
    alive = lifetimes(graph, stats)
    places = candidate_starts(graph, stats, alive)
    if len(places) == 1:
        return tuple(places[:-1])
    kept, saved = interval_bytes(graph, stats, alive, places)
    return tuple(places[k] for k in choose_segments(kept, saved).starts)


def with_segments(
    cost: CostGraph, graph: Graph, stats: GraphStats, starts: Sequence[int], hardware: Hardware
) -> CostGraph:
    """The cost graph with what each group keeps, and what its segment has saved when the group's backward runs: what
    the operations up to the group's last one save, since later ones let go of theirs first.

    Bytes that stay count for the group that reads them first in another segment than the one that makes them.
    Error: high where a cut coincides with the beginning of a segment, whose tensor then counts as kept and as received;
    and where it divides a segment, which counts as a whole on both stages.
    """
    pricing = Pricing(graph, stats, hardware, cost.batch)
    segment = np.searchsorted(starts, range(len(graph.ops)), side="right").tolist()  # 0: before the first
    root, alive = storage_names(graph, stats), lifetimes(graph, stats)
    kept, saved = [0] * len(graph.ops), [0] * len(graph.ops)
    for i, op in enumerate(graph.ops):
        own = round(pricing.scaled(stats.ops[op.name].saved_bytes, op.name))
        (saved if segment[i] else kept)[i] += own
    entered: set[str] = set()
    for i, op in enumerate(graph.ops):
        for name in op.reads:
            storage = root.get(name, name)
            if (
                storage in alive
                and storage not in entered
                and segment[i] != segment_at(alive[storage].made_at, segment)
            ):
                entered.add(storage)
                kept[i] += pricing.num_bytes(storage)
    for storage, life in alive.items():
        if life.saved_at is None or life.made_at < 0:
            continue
        if segment[life.saved_at] == segment[life.made_at] != 0:
            saved[life.saved_at] += pricing.num_bytes(storage)
        elif segment[life.saved_at] == 0 and storage not in entered:
            kept[life.saved_at] += pricing.num_bytes(storage)
    for i in range(1, len(graph.ops)):
        saved[i] += saved[i - 1] if segment[i] == segment[i - 1] else 0
    place = {op.name: i for i, op in enumerate(graph.ops)}
    groups = []
    for group in cost.groups:
        own = [place[name] for name in group.ops]
        most = max((saved[i] for i in own), default=0)
        groups.append(replace(group, kept_bytes=sum(kept[i] for i in own), segment_bytes=most))
    return replace(cost, groups=tuple(groups))


def segment_at(position: int, segment: Sequence[int]) -> int:
    """The segment of a position; an input is in none, not even in what comes before the first."""
    return segment[position] if position >= 0 else -1


# -- what there is to choose from ----------------------------------------------------------------------------------


def lifetimes(graph: Graph, stats: GraphStats) -> Mapping[str, Lifetime]:
    """The storage behind every input and every value, by the name of the first value in it; not that of weights."""
    root = storage_names(graph, stats)
    made = {value.name: -1 for value in graph.inputs}
    made |= {v.name: i for i, op in enumerate(graph.ops) for v in op.outputs if v.name not in root}
    last, saved = dict(made), dict[str, int]()
    for i, op in enumerate(graph.ops):
        own = stats.ops[op.name]
        for name in op.reads:
            last[root.get(name, name)] = i
        for name in own.saved_names(op):
            saved.setdefault(root.get(name, name), i)
    values = graph.values
    return {name: Lifetime(values[name].num_bytes, i, last[name], saved.get(name)) for name, i in made.items()}


def candidate_starts(graph: Graph, stats: GraphStats, alive: Mapping[str, Lifetime]) -> list[int]:
    """Where a segment may begin, in order: the first one must, and the last one is the end."""
    size, place = len(graph.ops), {op.name: i for i, op in enumerate(graph.ops)}
    first = first_start(graph, stats)
    steps = np.zeros(size + 2, dtype=np.int64)
    for life in alive.values():
        steps[life.made_at + 1] += life.num_bytes
        steps[max(life.made_at, life.last_read_at) + 1] -= life.num_bytes
    crossing = steps.cumsum()
    barred = np.zeros(size + 2, dtype=np.int64)
    for names in graph.colocated:
        barred[min(place[n] for n in names) + 1] += 1
        barred[max(place[n] for n in names) + 1] -= 1
    open_ = [i for i in np.flatnonzero(barred.cumsum()[:size] == 0).tolist() if i > first]
    around = [size, *open_, size]
    crossing[size] = np.iinfo(np.int64).max
    narrow = [
        here
        for before, here, after in zip(around, around[1:], around[2:])
        if crossing[here] <= crossing[before] and crossing[here] <= crossing[after]
    ]
    narrow = narrow[:: -(-len(narrow) // MAX_POSITIONS)] if narrow else narrow
    return [first, *narrow, size] if first < size else [size]


def first_start(graph: Graph, stats: GraphStats) -> int:
    """Behind the last operation that writes into an input: running it again would write twice."""
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
    """Of a segment from place k to place j, as elements [j, k]: bytes that it makes and that are read behind it, and
    bytes that come back while it runs again."""
    size = len(starts)
    kept, saved = (np.zeros((size + 1, size + 1), dtype=np.int64) for _ in range(2))

    def add(corners: Matrix, num_bytes: int, made: int, low: int, high: int) -> None:
        """For segments that begin up to ``made`` and end at a place from ``low`` to below ``high``."""
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


# -- the choice ----------------------------------------------------------------------------------------------------


def choose_segments(kept: Matrix, saved: Matrix) -> Segmentation:
    """The segments of least memory; matrices as `interval_bytes` gives them, starts counted in places.

    What is kept falls as the limit on the largest segment rises. Between two limits nothing is better than the kept
    bytes of the upper with the largest segment of the lower one, so most limits need no look.
    """
    finest = max(int(saved[j, i]) for i, j in pairwise(range(len(saved))))
    best = whole = min_boundary_bytes(kept, saved, int(saved[-1, 0]))
    unexplored = [(finest, whole)]  # limits from the first number to below the second's largest segment
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
    """The segments of at most ``limit`` bytes that keep least; of equals those with the smallest largest segment."""
    size = len(kept)
    total, largest, came = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for j in range(1, size):
        i = np.flatnonzero(saved[j, :j] <= limit)
        keeps = total[i] + kept[j, i]
        i = i[keeps == keeps.min()]
        peaks = np.maximum(largest[i], saved[j, i])
        came[j] = i[peaks.argmin()]
        total[j], largest[j] = keeps.min(), peaks.min()
    starts = [int(came[-1])]
    while starts[-1]:
        starts.append(int(came[starts[-1]]))
    return Segmentation(tuple(reversed(starts)), int(total[-1]), int(largest[-1]))
