"""Kernels of the backward.

A gradient reaches memory if it is that of an external operation's result, or of a value from another region. Its kernel
reads gradients in memory, and what its operations saved or compute again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autopar.cost.fusion.fused_graph import FusedGraph
from autopar.cost.fusion.kernel import Access, Draft, FusedKernel, merged_kernels
from autopar.ir.graph import Op, refs
from autopar.ops.registry import CHANNEL_NORMS

Node = tuple[str, int]  # a value, and the region in which its gradient is summed


def backward_kernels(fused: FusedGraph) -> Iterator[FusedKernel]:
    """All kernels of the backward."""
    gradients = Gradients(fused)
    drafts = (gradients.draft(node) for node in gradients.written)
    yield from merged_kernels(drafts, "backward", fused.position)


class Gradients:
    """Gradients of a graph's values.

    Args:
        readers: operations of a region that contribute to a gradient.
        same: the gradient whose memory a gradient shares, because a single operation passes it on unchanged.
        depth: largest number of external operations between the end of the region and a gradient.
        written: gradients that generated kernels write to memory.
    """

    def __init__(self, fused: FusedGraph) -> None:
        self.fused, self.graph = fused, fused.graph
        self.readers: defaultdict[Node, list[Op]] = defaultdict(list)
        self.regions: defaultdict[str, set[int]] = defaultdict(set)
        self.results = frozenset(refs(self.graph.outputs))
        self.same, self.depth = dict[Node, Node](), dict[Node, int]()
        for op in self.graph.ops:
            if any(made.requires_grad for made in fused.stats.ops[op.name].outputs):
                for name in dict.fromkeys(op.reads):
                    if fused.operands[name].requires_grad:
                        self.readers[name, fused.region[op.name]].append(op)
                        self.regions[name].add(fused.region[op.name])
        inputs = list(self.readers)
        made = [(v.name, fused.region[op.name]) for op in reversed(self.graph.ops) for v in op.outputs]
        for node in (*made, *inputs):  # inputs of regions after all that is computed from them
            self.visit(node)
        self.written = dict.fromkeys(self.written_gradients())

    def visit(self, node: Node) -> None:
        """Note a gradient's depth, and the gradient whose memory it shares."""
        if node in self.depth:
            return
        readers = self.readers[node]
        below = (
            max((self.depth[child] for child in self.children(op)), default=0) + (op.name in self.fused.external)
            for op in readers
        )
        self.depth[node] = max(below, default=0)
        if len(readers) == 1 and not self.arriving(node):
            (op,), children = readers, self.children(readers[0])
            passed = op.reads.index(node[0]) not in self.fused.stats.ops[op.name].gradients
            if op.name not in self.fused.external and passed and len(children) == 1:
                self.same[node] = self.same.get(children[0], children[0])

    def home(self, name: str) -> int:
        """Region that makes a value; 0 for inputs and weights."""
        producer = self.graph.producer.get(name)
        return 0 if producer is None else self.fused.region[producer.name]

    def arriving(self, node: Node) -> list[int]:
        """Other regions, and 0 for the loss, whose part of a gradient arrives in memory."""
        name, region = node
        if region != self.home(name):
            return []
        return [*sorted(self.regions[name] - {region}), *([0] if name in self.results else [])]

    def children(self, op: Op) -> list[Node]:
        """Gradients from which an operation's backward computes those of its operands."""
        made, region = self.fused.stats.ops[op.name].outputs, self.fused.region[op.name]
        return [(v.name, region) for v, o in zip(op.outputs, made) if o.requires_grad]

    def written_gradients(self) -> Iterator[Node]:
        """Gradients that a generated kernel writes: those that an external operation or another region reads."""
        fused = self.fused
        for name, region in self.depth:
            producer = self.graph.producer.get(name)
            outside = producer is None or fused.region[producer.name] != region or producer.name in fused.external
            if outside and name not in self.graph.weight and fused.operands[name].requires_grad:
                node = self.same.get((name, region), (name, region))
                readers = self.readers[node]
                if len(readers) + len(self.arriving(node)) > 1 or any(op.name not in fused.external for op in readers):
                    yield node

    def draft(self, target: Node) -> Draft:
        """The kernel that writes one gradient."""
        fused, own = self.fused, Access(self.owner(target).name, target[0])
        found = Draft((target[1], self.depth[target]), prod(fused.operands[target[0]].shape))
        found.writes["gradient", target] = own
        waiting, seen = [(target, own)], dict[Node, float]()
        while waiting:
            node, access = waiting.pop()
            if seen.get(node, 0) >= access.times:
                continue
            seen[node] = access.times
            for region in self.arriving(node):
                found.add_read(("arriving", node, region), access)
            for op in self.readers[node]:
                if op.name in fused.external:
                    found.add_read(("external", node, op.name), access)
                    continue
                found.ops.add(op.name)
                times = access.times * (2 if op.target in CHANNEL_NORMS else 1)
                for saved in fused.backward_reads(op):
                    read = replace(saved, times=saved.times * times)
                    found.add_read(("saved", fused.root(saved.tensor)), read, fused.part(saved.tensor))
                for child in self.children(op):
                    below, read = self.same.get(child, child), Access(op.name, child[0], times)
                    if below in self.written and below != target:
                        found.add_read(("gradient", below), read)
                    else:
                        waiting.append((below, read))
        return found

    def owner(self, node: Node) -> Op:
        """The operation to which accesses to a gradient belong: a fused reader of the value, else another one."""
        readers = self.readers[node]
        return (
            next((op for op in readers if op.name not in self.fused.external), (readers or [None])[0])
            or (self.graph.producer[node[0]])
        )
