"""What compiled regions keep for their backward: of what they fuse, what it is made of where that is less."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod

import torch

from autopar.cost.ops.op_stats import Facts, OpStats, storage_of
from autopar.ir.graph import Graph, Op, refs
from autopar.ops.regions import region_starts
from autopar.ops.registry import operator

# Beside the operations that torch tags as pointwise: these move elements, or scale rows by sums of them.
MOVES = frozenset(f"aten.{name}" for name in ("contiguous.default", "index.Tensor", "pad.default", "roll.default"))
NORMS = frozenset(f"aten.{name}.default" for name in ("group_norm", "layer_norm", "rms_norm"))
SOFTMAX = frozenset(("aten.softmax.int", "aten.log_softmax.int"))
FUSED = MOVES | NORMS | SOFTMAX | {"aten.to.dtype"}
ROW_BYTES = 8  # the largest element of a softmax's row and its sum, in float32

# Tensors, each with an operation that reads it and the number of its operand there.
Sources = dict[str, tuple[str, int]]


def compiled_facts(graph: Graph, facts: Facts) -> Facts:
    """The facts of a graph whose regions torch.compile makes kernels of.

    What fused kernels alone make and read is not written to memory in the forward, unless it is kept. Where what it is
    made of takes fewer bytes, torch keeps that and makes it again in the backward: attention's float32 probabilities
    from scores in bfloat16, a float32 sum of residuals from its new summand.

    Error: torch looks for the minimum cut between a region's forward and backward, with penalties for long chains; here
    one tensor after the other is compared with what it is made of.

    Source: min_cut_rematerialization_partition in torch's torch/_functorch/partitioners.py.
    """
    fusing = PartitionerModel(graph, facts)
    kept = {fusing.tensor(name) for op in graph.ops for name in facts.ops[op.name].saved_names(op)}
    given_up, further = set[str](), Counter[str]()
    instead = defaultdict[str, set[int]](set)
    for name in sorted(kept & fusing.maker.keys() - fusing.written, key=lambda name: fusing.maker[name]):
        sources, rows = fusing.behind(name, kept, {}), fusing.row_bytes(name)
        if fusing.num_bytes(sources) + rows < fusing.num_bytes([name]):
            given_up.add(name)
            kept |= sources.keys()
            further[graph.ops[fusing.maker[name]].name] += rows
            for reader, operand in sources.values():
                instead[reader].add(operand)

    changed = dict[tuple, OpStats]()  # operations alike go on sharing theirs

    def exchanged(op: Op) -> OpStats:
        own = facts.ops[op.name]
        operands = {i for i in own.saved_operands if fusing.tensor(op.reads[i]) not in given_up} | instead[op.name]
        outputs = tuple(j for j in own.saved_outputs if fusing.tensor(op.outputs[j].name) not in given_up)
        saved = tuple(sorted(operands)), outputs, own.saved_bytes + further[op.name]
        if saved == (own.saved_operands, own.saved_outputs, own.saved_bytes):
            return own
        new = replace(own, saved_operands=saved[0], saved_outputs=saved[1], saved_bytes=saved[2])
        return changed.setdefault((id(own), *saved), new)

    return Facts({op.name: exchanged(op) for op in graph.ops})


class PartitionerModel:
    """Which tensors of a graph are written to memory, and what the others are made of. Tensors go by the name of the
    first value in their memory, and ``maker`` has the position of the operation that makes each."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.graph, self.facts, self.root = graph, facts, storage_of(graph, facts)
        self.maker = {v.name: i for i, op in enumerate(graph.ops) for v in op.outputs if v.name not in self.root}
        self.written = {name for name, i in self.maker.items() if not is_fused(graph.ops[i])}
        self.written |= {self.tensor(name) for name in refs(graph.outputs)}
        starts = region_starts(graph.ops)
        region = [bisect_right(starts, i) for i in range(len(graph.ops))]
        for i, op in enumerate(graph.ops):
            alone = facts.ops[op.name].moves_data and not is_fused(op)
            read = {self.tensor(name) for name in op.reads} & self.maker.keys()
            self.written |= {name for name in read if alone or region[self.maker[name]] != region[i]}

    def tensor(self, name: str) -> str:
        return self.root.get(name, name)

    def behind(self, name: str, kept: Collection[str], known: dict[str, Sources]) -> Sources:
        """What to keep beside ``kept`` so that fused operations can make a tensor again: the fewest bytes along each
        way to its written sources; ``known`` has the tensors that were looked at."""
        op, found = self.graph.ops[self.maker[name]], Sources()
        for operand, read in enumerate(op.reads):
            source = self.tensor(read)
            if source in kept or source in self.graph.weight:
                continue
            if source not in known:
                known[source] = own = {source: (op.name, operand)}
                if source in self.maker and source not in self.written:
                    known[source] = min(own, self.behind(source, kept, known), key=self.num_bytes)
            found |= known[source]
        return found

    def num_bytes(self, names: Iterable[str]) -> int:
        return sum(self.graph.values[name].num_bytes for name in names)

    def row_bytes(self, name: str) -> int:
        """What is kept of a tensor's rows beside its sources, if it is a softmax."""
        op = self.graph.ops[self.maker[name]]
        return ROW_BYTES * prod(op.outputs[0].shape[:-1]) if op.target in SOFTMAX else 0


def is_fused(op: Op) -> bool:
    """Whether an operation becomes part of a kernel with others, and costs little to run again."""
    if not op.outputs or op.mutates:
        return False
    return op.target in FUSED or torch.Tag.pointwise in operator(op.target).tags
