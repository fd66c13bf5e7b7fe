"""The priced model: groups of operations, the tensors that flow between them, and the tensors that stay in memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

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
        reduce_seconds: gradient reduction over the replicas, which the last backward can hide.
        gather_seconds: under ZeRO, all-gather of the updated weight, which the first forward can hide.
        num_buckets: the weight's share of its gradient bucket; weights of one bucket sum to 1. 0 without replicas.
        contention_seconds: slowdown of compute by that communication even where it is hidden.
        gradient_bytes: main gradient, included in ``num_bytes``; under ZeRO-2 the whole one, of which ``num_bytes``
            includes the rank's part.
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
    gather_seconds: float = 0.0
    num_buckets: float = 0.0
    contention_seconds: float = 0.0
    gradient_bytes: int = 0
    wgrad_bytes: int = 0
    copy_bytes: int = 0
    flattened_grad_bytes: int = 0

    @property
    def has_fused_wgrad(self) -> bool:
        """Whether the wgrad GEMM accumulates into the main gradient, so that there is no temporary gradient."""
        return self.gradient_bytes > 0 and self.wgrad_bytes == 0


@dataclass(frozen=True)
class CostGraph:
    """A directed acyclic graph of groups, numbered so that every edge leads from a lower to a higher number.

    The last group is the loss: it has no operations, reads the model's outputs and belongs to the last stage.
    ``colocated`` lists groups that update the same state and must share a stage. ``derived`` keeps what a solver has
    computed from this graph alone, by a key.
    """

    model: str
    batch: int
    groups: tuple[Group, ...]
    edges: tuple[TensorEdge, ...]
    weights: tuple[ResidentTensor, ...] = ()
    saved: tuple[ResidentTensor, ...] = ()
    colocated: tuple[tuple[int, ...], ...] = ()
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.groups)
        for edge in self.edges:
            forwards = all(edge.producer < c < n for c in edge.consumers)
            assert edge.consumers and forwards, f"edge {edge.value} runs backwards"
        for tensor in (*self.weights, *self.saved):
            assert tensor.groups and all(0 <= g < n for g in tensor.groups), f"no group uses {tensor.name}"

    @property
    def loss(self) -> int:
        """Number of the loss group."""
        return len(self.groups) - 1

    @cached_property
    def recomputed(self) -> CostGraph:
        """The graph if every stage recomputes."""
        edges = tuple(replace(edge, saved_by=()) for edge in self.edges)
        return replace(self, groups=tuple(group.recomputed for group in self.groups), edges=edges, saved=())

    @cached_property
    def cut_bytes(self) -> tuple[int, ...]:
        """Bytes per microbatch that would cross a cut after each group, in order, without the loss."""
        crossing = [0] * self.loss
        for edge in self.edges:
            for boundary in range(edge.producer, max(edge.consumers)):
                crossing[boundary] += edge.num_bytes
        return tuple(crossing)

    def __str__(self) -> str:
        """A row per group: its times, the bytes that it saves, its predecessors, and what crosses a cut after it."""
        rows = [f"{self.model}: {len(self.groups)} groups, {len(self.edges)} flows, microbatch of {self.batch}"]
        for i, g in enumerate(self.groups):
            reads = ", ".join(map(str, sorted({edge.producer for edge in self.edges if i in edge.consumers})))
            cut = f", a cut after it sends {self.cut_bytes[i] / 2**20:.2f} MiB" if i < self.loss else ""
            rows.append(
                f"{i:4d} {g.name}: F {g.forward_seconds * 1e3:.3f} ms, B {g.backward_seconds * 1e3:.3f} ms, "
                f"saves {g.saved_bytes / 2**20:.2f} MiB, reads [{reads}]{cut}"
            )
        return "\n".join(rows)
