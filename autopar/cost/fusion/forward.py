"""Kernels of the forward.

A value of fused operations reaches memory only if an external operation, another region, the caller or the backward
reads it. Each kernel that needs another value computes it again from what is in memory.

Source: torch/_inductor/ir.py and scheduler.py of torch 2.11, and kernels of docs/benchmarks/h100-x1-kernels-*.json.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod

from autopar.cost.fusion.fused_graph import ROW_NORMS, SOFTMAX, FusedGraph
from autopar.cost.fusion.kernel import Access, Draft, FusedKernel, merged_kernels
from autopar.ir.graph import Op, refs
from autopar.ops.registry import CHANNEL_NORMS

# A longer row does not stay in registers between the pass for statistics and that for values (inductor's persistent
# reductions).
MAX_PERSISTENT_ROW = 1024


def forward_kernels(fused: FusedGraph) -> Iterator[FusedKernel]:
    """All kernels of the forward."""
    depth, written = depths(fused), set(written_values(fused))
    makers = [op for op in fused.graph.ops if op.name not in fused.external and fused.stats.ops[op.name].moves_data]

    drafts = (
        draft(op, v.name, fused, written, depth[op.name]) for op in makers for v in op.outputs if v.name in written
    )
    yield from merged_kernels(drafts, "forward", fused.position)
    yield from in_place_kernels(fused)


def in_place_kernels(fused: FusedGraph) -> Iterator[FusedKernel]:
    """A kernel for each operation that updates memory, such as a counter of batches."""
    for op in fused.graph.ops:
        if not op.outputs and op.reads and op.name not in fused.external:
            yield FusedKernel("forward", (op.name,), (Access(op.name, op.reads[0]),), (Access(op.name, op.reads[0]),))


def depths(fused: FusedGraph) -> Mapping[str, int]:
    """Largest number of external operations on a path to each operation within its region."""
    after, depth = dict[str, int](), dict[str, int]()
    for op in fused.graph.ops:
        region = fused.region[op.name]
        near = (r for r in op.reads if r in after and fused.region[fused.graph.producer[r].name] == region)
        depth[op.name] = max((after[r] for r in near), default=0)
        after |= {v.name: depth[op.name] + (op.name in fused.external) for v in op.outputs}
    return depth


def written_values(fused: FusedGraph) -> Iterator[str]:
    """Values that something else than a fused operation of their region reads in memory."""
    yield from fused.saved
    yield from map(fused.root, refs(fused.graph.outputs))
    for op in fused.graph.ops:
        for name in op.reads:
            maker = fused.maker(name)
            if maker is not None and (op.name in fused.external or fused.region[maker.name] != fused.region[op.name]):
                yield fused.root(name)


def draft(op: Op, name: str, fused: FusedGraph, written: Collection[str], depth: int) -> Draft:
    """The kernel that makes one value.

    Args:
        written: values in memory.
    """
    found = Draft((fused.region[op.name], depth), prod(fused.operands[name].shape))
    write = replace(fused.access(op.name, name), is_transposed=name in fused.copied_roots)
    found.writes["value", name] = write
    if name in fused.masks:
        found.writes["mask", name] = Access(op.name, name, fused.masks[name])
    waiting, seen = list[tuple[Op, float]]([(op, 1)]), dict[str, float]()
    while waiting:
        member, times = waiting.pop()
        if seen.get(member.name, 0) >= times:
            continue
        seen[member.name] = times
        found.ops.add(member.name)
        times *= passes(member, fused)
        for read in member.reads:
            root, maker = fused.root(read), fused.maker(read)
            if root in fused.graph.weight:
                continue
            if maker is None or root in written or maker.name in fused.external:
                found.add_read(("value", root), fused.access(member.name, read, times), fused.part(read))
            else:
                waiting.append((maker, times))
    return found


def passes(op: Op, fused: FusedGraph) -> int:
    """Number of passes over its operands in which an operation computes statistics, and values from them."""
    if op.target in CHANNEL_NORMS:
        return 2
    if op.target not in ROW_NORMS | SOFTMAX:
        return 1
    row = fused.operands[op.reads[0]].shape[-1]
    return 2 if row > MAX_PERSISTENT_ROW else 1
