"""What compiled regions keep for their backward: of what they fuse, what it is made of where that is less."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod

import torch

from autopar.cost.ops.op_stats import GraphStats, OpStats, storage_names
from autopar.ir.graph import Graph, Op, refs
from autopar.ops.regions import region_starts
from autopar.ops.registry import operator

# Beside the operations that torch tags as pointwise: these move elements, or scale rows by sums of them.
DATA_MOVEMENT = frozenset(
    f"aten.{name}" for name in ("contiguous.default", "index.Tensor", "pad.default", "roll.default")
)
NORMS = frozenset(f"aten.{name}.default" for name in ("group_norm", "layer_norm", "rms_norm"))
SOFTMAX = frozenset(("aten.softmax.int", "aten.log_softmax.int"))
FUSIBLE = DATA_MOVEMENT | NORMS | SOFTMAX | {"aten.to.dtype"}
ROW_BYTES = 8  # the largest element of a softmax's row and its sum, in float32

# Tensors, each with an operation that reads it and the number of its operand there.
Sources = dict[str, tuple[str, int]]


def compiled_stats(graph: Graph, stats: GraphStats) -> GraphStats:
    """The facts of a graph whose regions torch.compile makes kernels of.

    What fused kernels alone make and read is not written to memory in the forward, unless it is kept. Where what it is
    made of takes fewer bytes, torch keeps that and makes it again in the backward: attention's float32 probabilities
    from scores in bfloat16, a float32 sum of residuals from its new summand.

    Error: torch looks for the minimum cut between a region's forward and backward, with penalties for long chains; here
    one tensor after the other is compared with what it is made of.

    Source: min_cut_rematerialization_partition in torch's torch/_functorch/partitioners.py.
    """
    partitioner = PartitionerModel(graph, stats)
    kept = {partitioner.tensor(name) for op in graph.ops for name in stats.ops[op.name].saved_names(op)}
    dropped, extra_bytes = set[str](), Counter[str]()
    also_saved = defaultdict[str, set[int]](set)
    for name in sorted(
        kept & partitioner.producer_index.keys() - partitioner.written,
        key=lambda name: partitioner.producer_index[name],
    ):
        sources, rows = partitioner.sources(name, kept, {}), partitioner.row_bytes(name)
        if partitioner.num_bytes(sources) + rows < partitioner.num_bytes([name]):
            dropped.add(name)
            kept |= sources.keys()
            extra_bytes[graph.ops[partitioner.producer_index[name]].name] += rows
            for reader, operand in sources.values():
                also_saved[reader].add(operand)

    changed = dict[tuple, OpStats]()  # operations alike go on sharing theirs

    def exchanged(op: Op) -> OpStats:
        own = stats.ops[op.name]
        operands = {i for i in own.saved_operands if partitioner.tensor(op.reads[i]) not in dropped} | also_saved[
            op.name
        ]
        outputs = tuple(j for j in own.saved_outputs if partitioner.tensor(op.outputs[j].name) not in dropped)
        saved = tuple(sorted(operands | also_saved[op.name])), outputs, own.saved_bytes + extra_bytes[op.name]
        if saved == (own.saved_operands, own.saved_outputs, own.saved_bytes):
            return own
        new = replace(own, saved_operands=saved[0], saved_outputs=saved[1], saved_bytes=saved[2])
        return changed.setdefault((id(own), *saved), new)

    return GraphStats({op.name: exchanged(op) for op in graph.ops})


class PartitionerModel:
    """Which tensors of a graph are written to memory, and what the others are made of. Tensors go by the name of the
    first value in their memory, and ``maker`` has the position of the operation that makes each."""

    def __init__(self, graph: Graph, stats: GraphStats) -> None:
        self.graph, self.stats, self.storage = graph, stats, storage_names(graph, stats)
        self.producer_index = {
            v.name: i for i, op in enumerate(graph.ops) for v in op.outputs if v.name not in self.storage
        }
        self.written = {name for name, i in self.producer_index.items() if not is_fusible(graph.ops[i])}
        self.written |= {self.tensor(name) for name in refs(graph.outputs)}
        starts = region_starts(graph.ops)
        region = [bisect_right(starts, i) for i in range(len(graph.ops))]
        for i, op in enumerate(graph.ops):
            alone = stats.ops[op.name].moves_data and not is_fusible(op)
            read = {self.tensor(name) for name in op.reads} & self.producer_index.keys()
            self.written |= {name for name in read if alone or region[self.producer_index[name]] != region[i]}

    def tensor(self, name: str) -> str:
        return self.storage.get(name, name)

    def sources(self, name: str, kept: Collection[str], known: dict[str, Sources]) -> Sources:
        """What to keep beside ``kept`` so that fused operations can make a tensor again: the fewest bytes along each
        way to its written sources; ``known`` has the tensors that were looked at."""
        op, found = self.graph.ops[self.producer_index[name]], Sources()
        for operand, read in enumerate(op.reads):
            source = self.tensor(read)
            if source in kept or source in self.graph.weight:
                continue
            if source not in known:
                known[source] = own = {source: (op.name, operand)}
                if source in self.producer_index and source not in self.written:
                    known[source] = min(own, self.sources(source, kept, known), key=self.num_bytes)
            found |= known[source]
        return found

    def num_bytes(self, names: Iterable[str]) -> int:
        return sum(self.graph.values[name].num_bytes for name in names)

    def row_bytes(self, name: str) -> int:
        """What is kept of a tensor's rows beside its sources, if it is a softmax."""
        op = self.graph.ops[self.producer_index[name]]
        return ROW_BYTES * prod(op.outputs[0].shape[:-1]) if op.target in SOFTMAX else 0


def is_fusible(op: Op) -> bool:
    """Whether an operation becomes part of a kernel with others, and costs little to run again."""
    if not op.outputs or op.mutates:
        return False
    return op.target in FUSIBLE or torch.Tag.pointwise in operator(op.target).tags
