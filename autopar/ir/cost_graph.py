"""The priced model: groups of operations, the tensors that flow between them, and the tensors that stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from autopar.ir.activation import NO_SEGMENT, Activation

T = TypeVar("T")

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
        kept_bytes: the group's ``saved_bytes`` if its segment recomputes.
        segment_bytes: activations that recomputation restores before the group's backward: those of its segment up to
            this group.
        segments: numbers of the checkpoint segments that its operations belong to, the anchor's first.
        recompute_seconds: part of ``backward_seconds`` that runs the forward again.
        wgrad_seconds: part of ``backward_seconds`` that a split backward leaves for later.
        deferred_bytes: inputs and gradients of outputs that it keeps until then.
        forward_collective_seconds, backward_collective_seconds: time of tensor-parallel collectives.
        symmetric_buffer_bytes: symmetric memory that the group's largest collective needs, 0 where it uses none.
        workspace_bytes: memory that kernels may take while none of the group's other memory is freed yet.
        forward_exchange_seconds, backward_exchange_seconds: waits for sharded parameters and for the reduction of
            gradients that compute does not hide, and compute that they slow down (ZeRO-3).
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
    segments: tuple[int, ...] = (0,)
    recompute_seconds: float = 0.0
    forward_exchange_seconds: float = 0.0
    backward_exchange_seconds: float = 0.0
    wgrad_seconds: float = 0.0
    deferred_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward time."""
        return self.forward_seconds + self.backward_seconds

    @property
    def collective_seconds(self) -> float:
        """Time of collectives of shards and of replicas that compute does not hide, forward and backward."""
        shards = self.forward_collective_seconds + self.backward_collective_seconds
        return shards + self.forward_exchange_seconds + self.backward_exchange_seconds

    @property
    def segment(self) -> int:
        """Number of the anchor's segment."""
        return self.segments[0] if self.segments else NO_SEGMENT

    def recomputed(self, counted_bytes: int, restored_before: int) -> Group:
        """The group if its segment recomputes: its backward runs its forward again.

        Args:
            counted_bytes: part of ``kept_bytes`` that counts elsewhere.
            restored_before: part of ``segment_bytes`` that its stage does not restore.
        """
        again = self.forward_seconds - self.forward_exchange_seconds  # one gather serves the second run too
        return replace(
            self,
            backward_seconds=self.backward_seconds + again,
            recompute_seconds=again,
            saved_bytes=self.kept_bytes - counted_bytes,
            transient_bytes=self.transient_bytes + self.segment_bytes - restored_before,
            backward_collective_seconds=self.backward_collective_seconds + self.forward_collective_seconds,
        )


@dataclass(frozen=True)
class TensorEdge:
    """A tensor that one group produces and other groups read.

    Args:
        num_bytes: size for one microbatch, byte.
        saved_by: groups that keep the tensor's memory for their backward: the producer or groups after it.
        activation: keepers, of which ``saved_by`` are those without recomputation. If it is None, ``saved_by`` keep the
            tensor while their segment does not recompute.
    """

    value: str
    producer: int
    consumers: tuple[int, ...]
    num_bytes: int
    requires_grad: bool
    saved_by: tuple[int, ...] = ()
    activation: Activation | None = None


@dataclass(frozen=True)
class ResidentTensor:
    """A tensor on every stage with one of ``groups``: a weight, or an activation that groups save.

    A weight counts one rank's part of its value, gradient and optimizer state, for the whole step. A saved activation
    is memory that groups keep for their backward; it counts once per microbatch.

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
        block: under ZeRO-3, the weight's block of parameters.
        is_gathered: whether replicas gather the weight before each use; ``num_bytes`` then has the rank's part of what
            programs read.
        activation: keepers, of which ``groups`` are those without recomputation. If it is None, ``groups`` keep the
            tensor while their segment does not recompute.
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
    block: str = ""
    is_gathered: bool = False
    activation: Activation | None = None

    @property
    def has_fused_wgrad(self) -> bool:
        """Whether the wgrad GEMM accumulates into the main gradient, so that there is no temporary gradient."""
        return self.gradient_bytes > 0 and self.wgrad_bytes == 0


@dataclass(frozen=True)
class CostGraph:
    """A directed acyclic graph of groups, numbered so that every edge leads from a lower to a higher number.

    The last group is the loss: it has no operations, reads the model's outputs and belongs to the last stage.
    ``colocated`` lists groups that update the same state and must share a stage. ``saved`` are the activations that
    the groups' ``saved_bytes`` leave out: those of several groups, and those of operations in another segment than
    their group's anchor. Segments with a number below ``recomputed_below`` recompute. ``derived`` keeps what a solver
    has computed from this graph alone, by a key, and ``shared`` what it has computed from some of its fields.
    """

    model: str
    batch: int
    groups: tuple[Group, ...]
    edges: tuple[TensorEdge, ...]
    weights: tuple[ResidentTensor, ...] = ()
    saved: tuple[ResidentTensor, ...] = ()
    colocated: tuple[tuple[int, ...], ...] = ()
    recomputed_below: int = field(default=0, compare=False)
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    shared: dict[Hashable, tuple[tuple[Any, ...], Any]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.groups)
        for edge in self.edges:
            forwards = all(edge.producer < c < n for c in edge.consumers)
            assert edge.consumers and forwards, f"edge {edge.value} runs backwards"
        for tensor in (*self.weights, *self.saved):
            assert all(0 <= g < n for g in tensor.groups), f"{tensor.name} names groups that do not exist"
        for weight in self.weights:
            assert weight.groups, f"no group uses {weight.name}"

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """The entry of ``derived`` for a key, made if it is the first one."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def remember_for(self, fields: tuple[str, ...], key: Hashable, make: Callable[[], T]) -> T:
        """As `remember`, for what depends on some fields alone: graphs that `dataclasses.replace` makes of this one
        without changing them find it too."""
        own = tuple(getattr(self, name) for name in fields)
        place = (key, *map(id, own))
        if place not in self.shared:
            self.shared[place] = own, make()  # which keeps the fields, so that their ids stay theirs
        return self.shared[place][1]

    @property
    def once(self) -> CostGraph:
        """The graph without the recomputation of `recomputed_up_to`."""
        return self.derived.get("once", self)

    @property
    def loss(self) -> int:
        """Number of the loss group."""
        return len(self.groups) - 1

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Numbers of all segments, in execution order."""
        return self.segments_on([0] * len(self.groups), 0)

    @cached_property
    def recomputed(self) -> CostGraph:
        """The graph if all segments recompute."""
        return self.recomputed_up_to(1 + max((own for group in self.groups for own in group.segments), default=0))

    def recomputed_up_to(self, segment: int) -> CostGraph:
        """The graph if the segments below a number recompute. ``derived`` keeps it.

        Error: ``transient_bytes`` are high on a stage that begins inside a segment, whose earlier part it does not
            restore; `recomputed_on` leaves that part out.
        """

        def made() -> CostGraph:
            size = len(self.groups)
            fields = "groups", "edges", "saved"
            graph = self.remember_for(
                fields, ("recomputed", segment), lambda: self._recomputed([segment] * size, [0] * size)
            )
            parts = {name: getattr(graph, name) for name in fields}
            graph = replace(self, **parts, recomputed_below=segment)
            graph.derived["once"] = self
            return graph

        return self.remember(("recomputed", segment), made)

    def recomputed_on(self, stage_of: Sequence[int], levels: Sequence[int]) -> CostGraph:
        """The graph if each stage recomputes its first segments.

        Args:
            stage_of: stage of each group.
            levels: number of segments that each stage recomputes, of those that `segments_on` lists.
        """
        again = [self.segments_on(stage_of, stage)[:level] for stage, level in enumerate(levels)]
        bounds = [again[stage][-1] + 1 if again[stage] else 0 for stage in stage_of]
        done: dict[int, int] = {}  # segment_bytes up to the last group so far, by segment
        before: dict[tuple[int, int], int] = {}  # those of earlier stages, by segment and stage
        for group, stage in zip(self.groups, stage_of, strict=True):
            before.setdefault((group.segment, stage), done.get(group.segment, 0))
            done[group.segment] = max(done.get(group.segment, 0), group.segment_bytes)
        return self._recomputed(bounds, [before[g.segment, stage] for g, stage in zip(self.groups, stage_of)])

    def segments_on(self, stage_of: Sequence[int], stage: int) -> tuple[int, ...]:
        """Numbers of the segments of a stage, in execution order; a divided segment is one on each side of the cut."""
        found = {own for g, s in zip(self.groups, stage_of, strict=True) if s == stage and g.ops for own in g.segments}
        return tuple(sorted(found - {NO_SEGMENT}))

    def _recomputed(self, bounds: Sequence[int], restored_before: Sequence[int]) -> CostGraph:
        """The graph if segments below the bound of each group recompute.

        Args:
            restored_before: part of each group's ``segment_bytes`` that is not restored on its stage.
        """
        again = [0 <= group.segment < bound for group, bound in zip(self.groups, bounds, strict=True)]
        counted, saved = [0] * len(self.groups), list[ResidentTensor]()

        def keepers(groups: tuple[int, ...], activation: Activation | None) -> tuple[int, ...]:
            return tuple(g for g in groups if not again[g]) if activation is None else activation.groups(bounds)

        for tensor in self.saved:
            groups = keepers(tensor.groups, tensor.activation)
            saved.append(tensor if groups == tensor.groups else replace(tensor, groups=groups))
            entered = tensor.activation.entered_by if tensor.activation is not None else None
            if entered is not None and again[entered.group]:
                counted[entered.group] += tensor.num_bytes
        made = (
            group.recomputed(counted[g], restored_before[g]) if again[g] else group
            for g, group in enumerate(self.groups)
        )
        kept_by = (keepers(edge.saved_by, edge.activation) for edge in self.edges)
        edges = (
            edge if saved_by == edge.saved_by else replace(edge, saved_by=saved_by)
            for edge, saved_by in zip(self.edges, kept_by)
        )
        return replace(self, groups=tuple(made), edges=tuple(edges), saved=tuple(t for t in saved if t.groups))

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
