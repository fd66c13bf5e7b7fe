"""Parts of kernels that no sharding of other operations saves.

Collectives are external operations, so shardings only add values that reach memory. Which generated kernels become one,
what the backward computes again, and where elements lie apart depends on the sharding of other operations, and does not
count here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.fusion.fused_graph import FusedGraph
from autopar.cost.fusion.kernel import Access, Direction, FusedKernel
from autopar.cost.fusion.pooling import pooling_kernels
from autopar.cost.fusion.traffic import fused_traffic
from autopar.cost.ops.op_stats import FusedTraffic, GraphStats, OpStats
from autopar.ir.graph import Graph, Op, refs
from autopar.ops.registry import CHANNEL_NORMS

# Operations that copy or make a view, by strides, which depend on shardings.
MAYBE_VIEWS = frozenset(("aten.contiguous.default", "aten.flatten.using_ints", "aten.reshape.default"))


def least_traffic(graph: Graph, stats: GraphStats) -> Mapping[str, FusedTraffic]:
    """As `autopar.cost.fusion.traffic.fused_traffic`, of the parts of `least_kernels`.

    Args:
        stats: statistics of the compiled graph.
    """
    fused = FusedGraph(graph, stats, stats)
    sure = dict[str, OpStats]()
    for op in graph.ops:
        own = stats.ops[op.name]
        in_memory = tuple(i for i in own.saved_operands if fused.is_in_memory(op.reads[i]))
        sure[op.name] = replace(own, saved_operands=in_memory)
    return fused_traffic(graph, GraphStats(sure), (*pooling_kernels(fused), *least_kernels(fused)))


def least_kernels(fused: FusedGraph) -> Iterator[FusedKernel]:
    """For each fused operation and direction its accesses to what external operations make or read.

    A value with several readers is left out, since one of them may read it for all. An operation alone between external
    ones has a kernel for itself under every sharding; of others the launch does not count.
    """
    readers, results = defaultdict[str, list[Op]](list), frozenset(map(fused.root, refs(fused.graph.outputs)))
    for op in fused.graph.ops:
        if op.name in fused.external or fused.stats.ops[op.name].moves_data:
            for name in op.reads:
                readers[fused.root(name)].append(op)
    for op in fused.graph.ops:
        own = fused.stats.ops[op.name]
        if op.name in fused.external or not own.moves_data or not op.outputs or op.target in MAYBE_VIEWS:
            continue
        values = [i for i, name in enumerate(op.reads) if fused.root(name) not in fused.graph.weight]
        arriving = [i for i in values if fused.is_in_memory(op.reads[i]) and len(readers[fused.root(op.reads[i])]) == 1]
        made = [v.name for v in op.outputs]
        read = [name for name in made if any(reader.name in fused.external for reader in readers[name])]
        is_alone = arriving == values and read == made and all(len(readers[name]) == 1 for name in made)
        passes = 2 if op.target in CHANNEL_NORMS else 1

        operands = {i: Access(op.name, op.reads[i], passes) for i in arriving}
        written = [Access(op.name, name) for name in made if name in read or name in results]
        yield part("forward", op, (*operands.values(),), written, is_alone)
        if any(i in values for i in own.gradients):
            reads = [Access(op.name, name, passes) for name in read]
            reads += [operands[i] for i in own.saved_operands if i in operands]
            gradients = [Access(op.name, op.reads[i]) for i in own.gradients if i in operands]
            yield part("backward", op, reads, gradients, is_alone)


def part(
    direction: Direction, op: Op, reads: Sequence[Access], writes: Sequence[Access], is_kernel: bool
) -> FusedKernel:
    """An operation's accesses as a kernel, or, without anything written, as a part of one that another launches."""
    if is_kernel:
        return FusedKernel(direction, (op.name,), tuple(reads), tuple(writes))
    return FusedKernel(direction, (op.name,), (*reads, *writes), ())
