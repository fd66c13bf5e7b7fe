"""Activations that torch.compile saves: a fused value is replaced by its inputs where these are smaller.

A model of the min-cut partitioner in torch.compile, which decides per region what to save and what to recompute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import prod

import torch

from autopar.cost.fusion.fused_graph import MAX_POOL, RELU
from autopar.cost.fusion.fused_kernels import fused_kernels
from autopar.cost.fusion.traffic import fused_traffic
from autopar.cost.ops.kernel_shapes import group_padding
from autopar.cost.ops.op_stats import GraphStats, OpStats, storage_names
from autopar.ir.graph import Graph, Op, refs
from autopar.ops.regions import region_starts
from autopar.ops.registry import operator
from autopar.sharding.fuse_linear import is_layer

# Besides the operations that torch tags as pointwise: these move elements, scale rows by sums of them, or lack the tag.
DATA_MOVEMENT = frozenset(
    f"aten.{name}" for name in ("contiguous.default", "index.Tensor", "pad.default", "roll.default")
)
NORMS = frozenset(f"aten.{name}.default" for name in ("batch_norm", "group_norm", "layer_norm", "rms_norm"))
SOFTMAX = frozenset(("aten.softmax.int", "aten.log_softmax.int"))
UNTAGGED = frozenset(
    f"aten.{name}" for name in ("hardswish.default", "log_sigmoid.default", "prelu.default", "where.self")
)
FUSIBLE = DATA_MOVEMENT | NORMS | SOFTMAX | UNTAGGED | {"aten.to.dtype"}
# Reductions read what is recomputed, but their smaller results are saved.
REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in ("adaptive_avg_pool2d.default", "linalg_vector_norm.default", "mean.dim", "sum.dim_IntList")
) | {MAX_POOL}
EXTREMES = frozenset(("aten.amax.default", "aten.amin.default"))
INDEX_BYTES, SIGN_BYTES = 8, 1
ROW_BYTES = 8  # the largest element of a softmax's row and its sum, in float32

# Tensors by name, each with an operation that reads it and the index of the operand there.
Sources = dict[str, tuple[str, int]]


def compiled_stats(graph: Graph, stats: GraphStats, device_type: str = "cpu") -> GraphStats:
    """Statistics of a graph whose regions are compiled: ``saved_*`` follow the partitioner instead of eager autograd.

    A tensor that only fused kernels write and read reaches memory only if it is saved. If its sources take fewer bytes,
    torch saves the sources and recomputes the tensor in the backward. Examples are attention's float32 probabilities,
    recomputed from bfloat16 scores, and a float32 residual sum, recomputed from its new summand. A source that another
    region saves counts as one to save.

    Args:
        device_type: on which it runs: groups of convolutions are padded on ``cuda``.
    Error: torch finds the minimum cut between a region's forward and backward, with penalties for long chains. This
        model compares one tensor after the other with its sources.
    Source: min_cut_rematerialization_partition in torch's torch/_functorch/partitioners.py.
    """
    eager, stats = stats, GraphStats(decomposed_ops(graph, stats, device_type))
    partitioner = PartitionerModel(graph, stats)
    kept = [set[str]() for _ in range(max(partitioner.region, default=0) + 1)]  # by region
    for op, number in zip(graph.ops, partitioner.region):
        kept[number] |= {partitioner.tensor(name) for name in stats.ops[op.name].saved_names(op)}
    dropped, extra_bytes = set[str](), Counter[str]()
    also_saved = defaultdict[str, set[int]](set)
    for name in sorted(
        set[str]().union(*kept) & partitioner.producer_index.keys() - partitioner.written,
        key=lambda name: partitioner.producer_index[name],
    ):
        known = kept[partitioner.region[partitioner.producer_index[name]]]
        sources, rows = partitioner.sources(name, known, {}), partitioner.row_bytes(name)
        if partitioner.num_bytes(sources) + rows <= partitioner.num_bytes([name]):
            dropped.add(name)
            known |= sources.keys()
            extra_bytes[graph.ops[partitioner.producer_index[name]].name] += rows
            for reader, operand in sources.values():
                also_saved[reader].add(operand)

    changed = dict[tuple, OpStats]()  # equal operations keep sharing one object

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

    compiled = GraphStats({op.name: exchanged(op) for op in graph.ops})
    return replace(compiled, traffic=fused_traffic(graph, compiled, fused_kernels(graph, eager, compiled)))


def decomposed_ops(graph: Graph, stats: GraphStats, device_type: str) -> Mapping[str, OpStats]:
    """Statistics of each operation with what its decomposition saves, where that differs from eager mode.

    - A max pooling saves the offset of each maximum in its window instead of its index and its operand.
    - A ReLU whose result leaves its region saves which elements are positive, unless another operation of its region
      saves the result.
    - A maximum over dims saves which elements are maxima, unless another operation of its region saves the operand.
    - A linear layer whose wgrad GEMM accumulates saves its operand where autograd saves a dense copy of it.
    - A convolution whose groups are padded on a GPU saves its operand with the padding: in place of the operand if that
      is made for it alone, else as well. The padded weight that it saves is not counted.
    """
    storage, weights = storage_names(graph, stats), graph.weight
    readers = Counter(name for op in graph.ops for name in op.reads)
    starts, saving, leaving = region_starts(graph.ops), defaultdict[str, set[str]](set), {*refs(graph.outputs)}
    region = {op.name: bisect_right(starts, i) for i, op in enumerate(graph.ops)}
    for op in graph.ops:
        home = region[op.name]
        leaving |= {name for name in op.reads if name in graph.producer and region[graph.producer[name].name] != home}
        for name in stats.ops[op.name].saved_names(op):
            saving[storage.get(name, name)].add(op.name)
    changed = dict[tuple, OpStats]()  # equal operations keep sharing one object

    def decomposed(op: Op) -> OpStats:
        own, new = stats.ops[op.name], None
        if op.target == MAX_POOL and own.saved_bytes:
            new = replace(own, saved_operands=(), saved_bytes=own.saved_bytes // INDEX_BYTES)
        elif op.target == RELU and own.saved_outputs and op.outputs[0].name in leaving:
            others = saving[op.outputs[0].name] - {op.name}
            if all(region[other] != region[op.name] for other in others):
                new = replace(own, saved_outputs=(), saved_bytes=prod(op.outputs[0].shape) * SIGN_BYTES)
        elif op.target in EXTREMES and own.saved_operands:
            others = saving[storage.get(op.reads[0], op.reads[0])] - {op.name}
            if all(region[other] != region[op.name] for other in others):
                operand = graph.readable[op.reads[0]]
                new = replace(own, saved_operands=(), saved_outputs=(), saved_bytes=prod(operand.shape) * SIGN_BYTES)
        elif is_layer(op) and own.saved_bytes and 0 not in own.saved_operands:
            weight = weights.get(op.reads[1])
            if weight is not None and weight.dtype != weight.stored_dtype and readers[weight.name] == 1:
                new = replace(own, saved_operands=(0, *own.saved_operands), saved_bytes=0)
        elif device_type == "cuda" and 0 in own.saved_operands and (wide := group_padding(op, graph)[0]) > 1:
            x, maker = graph.readable[op.reads[0]], graph.producer.get(op.reads[0])
            alone = maker is not None and is_fusible(maker) and readers[x.name] == 1 and x.name not in leaving
            new = replace(own, saved_bytes=round((wide - alone) * x.num_bytes))
        return own if new is None else changed.setdefault((id(own), new.saved_outputs, new.saved_bytes), new)

    return {op.name: decomposed(op) for op in graph.ops}


class PartitionerModel:
    """Model of inductor's partitioner: tensors written to memory in the forward, and sources of all others.

    A tensor has the name of the first value in its memory. ``producer_index`` is the index of the operation that makes
    it, by name. ``region`` is the region of each operation. ``written`` are the tensors that reach memory whether or
    not they are saved.
    """

    def __init__(self, graph: Graph, stats: GraphStats) -> None:
        self.graph, self.stats, self.storage = graph, stats, storage_names(graph, stats)
        self.producer_index = {
            v.name: i for i, op in enumerate(graph.ops) for v in op.outputs if v.name not in self.storage
        }
        self.written = {name for name, i in self.producer_index.items() if not is_fusible(graph.ops[i])}
        self.written |= {self.tensor(name) for name in refs(graph.outputs)}
        starts = region_starts(graph.ops)
        region = self.region = [bisect_right(starts, i) for i in range(len(graph.ops))]
        for i, op in enumerate(graph.ops):
            alone = stats.ops[op.name].moves_data and not is_fusible(op) and op.target not in REDUCTIONS
            read = {self.tensor(name) for name in op.reads} & self.producer_index.keys()
            self.written |= {name for name in read if alone or region[self.producer_index[name]] != region[i]}

    def tensor(self, name: str) -> str:
        """Name of the tensor whose memory a value shares."""
        return self.storage.get(name, name)

    def sources(self, name: str, kept: Collection[str], known: dict[str, Sources]) -> Sources:
        """Tensors to save besides ``kept`` from which fused operations recompute a tensor.

        Along each path to a written source, the smallest tensor is taken. ``known`` memoises tensors already visited.
        """
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
        """Total size of some values, byte."""
        return sum(self.graph.values[name].num_bytes for name in names)

    def row_bytes(self, name: str) -> int:
        """Bytes of row maxima and row sums that recomputing a tensor needs: 0 unless it is a softmax."""
        op = self.graph.ops[self.producer_index[name]]
        return ROW_BYTES * prod(op.outputs[0].shape[:-1]) if op.target in SOFTMAX else 0


def is_fusible(op: Op) -> bool:
    """Whether torch.compile fuses an operation into a kernel with others, so that it is cheap to recompute."""
    if not op.outputs or (op.mutates and op.target not in NORMS):  # a norm may update its running statistics
        return False
    return op.target in FUSIBLE or torch.Tag.pointwise in operator(op.target).tags
