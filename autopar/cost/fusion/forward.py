"""Kernels of the forward.

A value of fused operations reaches memory only if an external operation, another region, the caller or the backward
reads it. Each kernel that needs another value computes it again from what is in memory.

Source: torch/_inductor/ir.py and scheduler.py of torch 2.11, and kernels of docs/benchmarks/h100-x1-kernels-*.json.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from autopar.cost.fusion.fused_graph import ACTIVATIONS, CHANNEL_NORMS, ROW_NORMS, SOFTMAX, FusedGraph
from autopar.cost.fusion.kernel import Access, Draft, FusedKernel, Place, merged_kernels
from autopar.ir.graph import Op, refs

# A longer row does not stay in registers between the pass for statistics and that for values (inductor's persistent
# reductions).
MAX_PERSISTENT_ROW = 1024


def forward_kernels(fused: FusedGraph) -> Iterator[FusedKernel]:
    """All kernels of the forward."""
    depth, written = depths(fused), dict.fromkeys(written_values(fused), 1)
    makers = [op for op in fused.graph.ops if op.name not in fused.external and fused.stats.ops[op.name].moves_data]

    def drafts() -> list[Draft]:
        made = ((op, v.name) for op in makers for v in op.outputs if v.name in written)
        return [draft(op, name, fused, written, depth[op.name]) for op, name in made]

    written |= {name: fused.float32_copies(name) for name in shared_norms(drafts(), fused, written)}
    yield from merged_kernels(drafts(), "forward", fused.position)
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


def shared_norms(drafts: Iterable[Draft], fused: FusedGraph, written: Collection[str]) -> Iterator[str]:
    """Results of norms over channels that several kernels would compute again, as `FusedGraph.recomputed_norms`."""
    places = defaultdict[str, set[Place]](set)
    for kernel in drafts:
        for name in kernel.ops:
            places[name].add(kernel.place)
    for op in fused.graph.ops:
        if op.target in CHANNEL_NORMS and len(places[op.name]) > 1:
            name = op.outputs[0].name
            if name not in written and any(reader.target in ACTIVATIONS for reader in fused.readers[name]):
                yield name


def draft(op: Op, name: str, fused: FusedGraph, written: Mapping[str, int], depth: int) -> Draft:
    """The kernel that makes one value.

    Args:
        written: values in memory, each with the bytes that it has there over its own.
    """
    found = Draft((fused.region[op.name], depth), prod(fused.operands[name].shape))
    write = replace(fused.access(op.name, name, written[name]), is_transposed=name in fused.copied_roots)
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
                access = fused.access(member.name, read, times * written.get(root, 1))
                found.add_read(("value", root), access, fused.part(read))
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
