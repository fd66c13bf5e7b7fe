"""A compiled graph as kernels see it: its regions, external operations, layouts and saved tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

from autopar.cost.fusion.kernel import Access
from autopar.cost.ops.op_stats import ATTENTION, GraphStats, OpStats, storage_names
from autopar.ir.graph import DTYPE_BYTES, Graph, Op
from autopar.ops.regions import region_starts
from autopar.ops.registry import Operand, operand_of
from autopar.sharding.fuse_linear import is_layer

ROW_NORMS = frozenset(f"aten.{name}.default" for name in ("layer_norm", "rms_norm"))
SOFTMAX = frozenset(("aten.softmax.int", "aten.log_softmax.int"))
# Reductions over pixels, whose kernels are as slow as sums over rows.
SPATIAL_MEANS = frozenset(("aten.adaptive_avg_pool2d.default", "aten.linalg_vector_norm.default"))
RELU, MAX_POOL = "aten.relu.default", "aten.max_pool2d.default"
# inductor writes what these read, and their gradient, to memory, because windows overlap.
POOLS = frozenset(("aten.avg_pool2d.default", MAX_POOL))


class FusedGraph:
    """A graph with its regions, and the operations that kernels of libraries compute."""

    def __init__(self, graph: Graph, eager: GraphStats, stats: GraphStats) -> None:
        self.graph, self.eager, self.stats, self.storage = graph, eager, stats, storage_names(graph, stats)
        starts = region_starts(graph.ops)
        self.region = {op.name: bisect_right(starts, i) for i, op in enumerate(graph.ops)}
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.external = {op.name for op in graph.ops if is_external(op, stats.ops[op.name])}
        self.saved = {self.root(name) for op in graph.ops for name in stats.ops[op.name].saved_names(op)}

    @cached_property
    def operands(self) -> Mapping[str, Operand]:
        """Shape, stride and dtype of each value, input and weight, as the statistics propagate them."""
        graph = self.graph
        known = {value.name: operand_of(value) for value in (*graph.inputs, *(w.value for w in graph.weights))}
        for op in graph.ops:
            known |= {v.name: made for v, made in zip(op.outputs, self.stats.ops[op.name].outputs)}
        return known

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Op]]:
        """Operations that read each value, input or weight."""
        readers: defaultdict[str, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            for name in dict.fromkeys(op.reads):
                readers[name].append(op)
        return readers

    def root(self, name: str) -> str:
        """Name of the value, input or weight whose memory a value shares."""
        return self.storage.get(name, name)

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """The first view that saw no more than a part of a value's memory, by the name of each view of that part."""
        found = dict[str, str]()
        for op in self.graph.ops:
            for output, operand in self.stats.ops[op.name].aliases:
                source, view = op.reads[operand], op.outputs[output].name
                if source in found or prod(self.operands[view].shape) < prod(self.operands[source].shape):
                    found[view] = found.get(source, view)
        return found

    def part(self, name: str) -> str:
        """Name of the part of a value's memory that a view sees; empty for the whole of it."""
        return self.parts.get(name, "")

    def maker(self, name: str) -> Op | None:
        """The operation that makes a value's memory; None for inputs and weights."""
        return self.graph.producer.get(self.root(name))

    def is_in_memory(self, name: str) -> bool:
        """Whether no generated kernel makes a value's memory."""
        maker = self.maker(name)
        return maker is None or maker.name in self.external

    def is_strided(self, name: str) -> bool:
        """Whether neighbours in a value's last dim lie apart in memory."""
        return is_strided(self.operands[name])

    def access(self, op: str, name: str, times: float = 1) -> Access:
        """An access to a value, transposed if it is a strided view of what an external operation wrote."""
        return Access(op, name, times, self.is_in_memory(name) and self.is_strided(name))

    @cached_property
    def copied_roots(self) -> frozenset[str]:
        """Values that only layers keep for the backward, which read strided views but need rows of neighbours."""
        strided = {op.name: op.reads[0] for op in self.graph.ops if is_layer(op) and self.is_strided(op.reads[0])}
        others = (op for op in self.graph.ops if op.name not in strided)
        kept = {self.root(name) for op in others for name in self.stats.ops[op.name].saved_names(op)}
        return frozenset(map(self.root, strided.values())) - kept

    @cached_property
    def masks(self) -> Mapping[str, float]:
        """Results of ReLUs whose signs are saved in their place, and the bytes of an element's sign over its own."""
        return {
            op.outputs[0].name: 1 / DTYPE_BYTES[op.outputs[0].dtype]
            for op in self.graph.ops
            if op.target == RELU and self.stats.ops[op.name].saved_bytes
        }

    def backward_reads(self, op: Op) -> Iterator[Access]:
        """Saved tensors that an operation's backward reads, or from which it computes what it needs again."""
        waiting, seen = [(op.name, name) for name in self.eager.ops[op.name].saved_names(op)], set[tuple]()
        while waiting:
            reader, name = waiting.pop()
            root, maker = self.root(name), self.maker(name)
            if (root, self.part(name)) in seen or root in self.graph.weight:
                continue
            seen.add((root, self.part(name)))
            if reader == op.name and root in self.masks and maker is op:
                yield Access(op.name, name, self.masks[root])
            elif root in self.saved or maker is None or maker.name in self.external:
                yield self.access(reader, name)
            else:
                waiting += ((maker.name, read) for read in maker.reads)


def is_strided(value: Operand) -> bool:
    """Whether neighbours in a value's last dim lie apart in memory."""
    return len(value.shape) > 1 and value.stride[-1] > 1 and min(value.shape[-2:]) > 1


def is_external(op: Op, stats: OpStats) -> bool:
    """Whether an operation is not fused: a library, a kernel of its own or a collective computes it."""
    is_alone = op.target in POOLS or op.target == ATTENTION or not op.target.startswith("aten.")
    return bool(op.home) or stats.forward_flops > 0 or is_alone
