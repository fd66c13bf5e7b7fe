"""The priced model: groups of operations, the tensors that flow between them, and the tensors that stay in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

# Gradients are reduced in buckets of this size, each as soon as its backward has run. The size is the default of
# PyTorch's DistributedDataParallel: large enough for full bandwidth, small enough to start early.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Group:
    """Operations that always share a stage: an anchor (a matmul, a norm, …) and the light operations that follow it.

    All numbers are for one rank and one microbatch.

    Args:
        forward_seconds, backward_seconds: tensor-parallel collectives included.
        saved_bytes: activations kept from forward to backward, without storages that other groups save too.
        transient_bytes: memory that the group's largest operation needs on top of the activations saved so far.
        kept_bytes: the group's ``saved_bytes`` on a stage that recomputes.
        segment_bytes: activations that recomputation restores before the group's backward: those of its segment up to
            this group.
        forward_collective_seconds, backward_collective_seconds: time of tensor-parallel collectives.
        symmetric_buffer_bytes: symmetric memory that the group's largest collective needs, 0 where it uses none.
        workspace_bytes: memory that kernels may take while none of the group's other memory is freed yet.
    """

    name: str
    ops: tuple[str, ...]
    module: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    flops: float = 0.0
    saved_bytes: int = 0
    transient_bytes: int = 0
    kept_bytes: int = 0
    segment_bytes: int = 0
    forward_collective_seconds: float = 0.0
    backward_collective_seconds: float = 0.0
    symmetric_buffer_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward time."""
        return self.forward_seconds + self.backward_seconds

    @property
    def recomputed(self) -> Group:
        """The group on a stage that recomputes: its backward runs its forward again."""
        return replace(
            self,
            backward_seconds=self.backward_seconds + self.forward_seconds,
            saved_bytes=self.kept_bytes,
            transient_bytes=self.transient_bytes + self.segment_bytes,
            backward_collective_seconds=self.backward_collective_seconds + self.forward_collective_seconds,
        )


@dataclass(frozen=True)
class TensorEdge:
    """A tensor that one group produces and other groups read.

    Args:
        num_bytes: size for one microbatch, byte.
        saved_by: groups that keep the tensor's memory for their backward: the producer or groups after it.
    """

    value: str
    producer: int
    consumers: tuple[int, ...]
    num_bytes: int
    requires_grad: bool
    saved_by: tuple[int, ...] = ()


@dataclass(frozen=True)
class ResidentTensor:
    """A tensor on every stage with one of ``groups``: a weight, or an activation that several groups save.

    A weight counts one rank's part of its value, gradient and optimizer state, for the whole step. A saved activation
    is one storage that several groups keep for their backward; it counts once per microbatch.

    Args:
        optimizer_seconds: the update, and other work that nothing hides, such as summing a gradient over shards.
        reduce_seconds: gradient reduction over the replicas, which the last backward can hide; under ZeRO-1 also the
            weight all-gather, which the first forward can hide.
        contention_seconds: slowdown of compute by that communication even where it is hidden.
        gradient_bytes: main gradient, included in ``num_bytes``.
        wgrad_bytes: temporary weight gradient that a backward produces, in the compute dtype; 0 where the wgrad matmul
            accumulates into the main gradient.
        copy_bytes: the low-precision copy that programs read, 0 where they read the stored weight.
        flattened_grad_bytes: gradient that is flattened for the sum over shards.
    """

    name: str
    num_bytes: int
    groups: tuple[int, ...]
    numel: int = 0
    optimizer_seconds: float = 0.0
    reduce_seconds: float = 0.0
    contention_seconds: float = 0.0
    gradient_bytes: int = 0
    wgrad_bytes: int = 0
    copy_bytes: int = 0
    flattened_grad_bytes: int = 0


@dataclass(frozen=True)
class CostGraph:
    """A directed acyclic graph of groups, numbered so that every edge leads from a lower to a higher number.

    The last group is the loss: it has no operations, reads the model's outputs and belongs to the last stage.
    ``colocated`` lists groups that update the same state and must share a stage.
    """

    model: str
    batch: int
    groups: tuple[Group, ...]
    edges: tuple[TensorEdge, ...]
    weights: tuple[ResidentTensor, ...] = ()
    saved: tuple[ResidentTensor, ...] = ()
    colocated: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.groups)
        for flow in self.edges:
            assert flow.consumers and all(flow.producer < c < n for c in flow.consumers), (
                f"flow {flow.value} runs backwards"
            )
        for holding in (*self.weights, *self.saved):
            assert holding.groups and all(0 <= g < n for g in holding.groups), f"{holding.name} is held by no group"

    @property
    def loss(self) -> int:
        """Number of the loss group."""
        return len(self.groups) - 1

    @cached_property
    def recomputed(self) -> CostGraph:
        """The graph if every stage recomputes."""
        flows = tuple(replace(flow, saved_by=()) for flow in self.edges)
        return replace(self, groups=tuple(group.recomputed for group in self.groups), edges=flows, saved=())

    @cached_property
    def digraph(self) -> nx.DiGraph:
        """Groups as nodes (attribute ``group``), an edge where a tensor flows (attribute ``num_bytes``, summed)."""
        import networkx as nx  # slow: workers, which plan nothing, do without

        graph = nx.DiGraph()
        graph.add_nodes_from((i, {"group": g}) for i, g in enumerate(self.groups))
        for flow in self.edges:
            for consumer in flow.consumers:
                known = graph.get_edge_data(flow.producer, consumer, {"num_bytes": 0})["num_bytes"]
                graph.add_edge(flow.producer, consumer, num_bytes=known + flow.num_bytes)
        return graph

    @cached_property
    def dominators(self) -> tuple[int, ...]:
        """Groups that every path from a source to the loss goes through, in order.

        Source: immediate dominators (Cooper, Harvey, Kennedy 2001, as in networkx) from a virtual entry.
        """
        import networkx as nx

        graph = self.digraph.copy()
        graph.add_edges_from([("entry", v) for v in self.digraph if self.digraph.in_degree(v) == 0])
        parent = nx.immediate_dominators(graph, "entry")
        chain, node = [], self.loss
        while node not in (None, "entry"):
            chain.append(node)
            node = parent[node]
        return tuple(reversed(chain))

    @cached_property
    def cut_candidates(self) -> tuple[tuple[int, int], ...]:
        """(group, bytes) for a cut after each group, in order: the bytes per microbatch that would cross the cut."""
        crossing = [0] * len(self.groups)
        for flow in self.edges:
            for boundary in range(flow.producer, max(flow.consumers)):
                crossing[boundary] += flow.num_bytes
        return tuple((i, crossing[i]) for i in range(self.loss))

    def __str__(self) -> str:
        """A row per group. ``|`` marks groups on every path; the bytes are what crosses a cut after the group."""
        rows = [f"{self.model}: {len(self.groups)} groups, {len(self.edges)} flows, microbatch of {self.batch}"]
        crossing, narrow = dict(self.cut_candidates), set(self.dominators)
        for i, g in enumerate(self.groups):
            reads = ", ".join(map(str, sorted(self.digraph.predecessors(i))))
            cut = f", a cut behind sends {crossing[i] / 2**20:.2f} MiB" if i in crossing else ""
            rows.append(
                f"{i:4d} {'|' if i in narrow else ' '} {g.name}: F {g.forward_seconds * 1e3:.3f} ms, "
                f"B {g.backward_seconds * 1e3:.3f} ms, saves {g.saved_bytes / 2**20:.2f} MiB, reads [{reads}]{cut}"
            )
        return "\n".join(rows)
