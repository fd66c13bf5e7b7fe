"""How a model can be sharded: the strategies of every group and their costs. The input of the sharding solver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autopar.ir.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class ShardingStrategy:
    """One way to run a group on the ranks of a tensor-parallel axis (Alpa's parallel strategy of a node).

    For example, strategy ``n`` of a linear layer splits its output features: it reads a replicated input with partial
    gradient (``tp:gradient``), its weight lies as ``tp:0``, and its output ``[batch, tokens, features]`` as ``tp:2``.

    Args:
        labels: the strategy of every operation of the group that is not replicated, by name.
        forward_seconds, backward_seconds: per microbatch on each rank, collectives inside the group included.
        step_seconds: spent once a step: the sum of the gradients of weights that are replicated and read on split data.
        saved_bytes: activations kept for the backward, per microbatch.
        weight_bytes: value, gradient and optimizer state of a rank's part.
        input_layouts: layout in which the group reads each of ``StrategyGroup.reads``.
        output_layouts: layout of each of ``StrategyGroup.makes``; never partial.
        weight_layouts: layout of each of ``StrategyGroup.weights``.
        context_seconds: part of ``seconds`` that strategies of other groups may save, as kernels fuse differently.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    saved_bytes: int
    weight_bytes: int
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    weight_layouts: tuple[Layout, ...]
    context_seconds: float = field(default=0.0, compare=False)

    @property
    def seconds(self) -> float:
        """Forward and backward time per microbatch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def least(self) -> ShardingStrategy:
        """The strategy without its ``context_seconds``, which count as the forward's."""
        return replace(self, forward_seconds=self.forward_seconds - self.context_seconds, context_seconds=0.0)


@dataclass(frozen=True)
class StrategyGroup:
    """A group and its strategies; the first one replicates everything. Groups of one ``kind`` use one strategy.

    Args:
        reads: values that other groups produce.
        makes: values that other groups read.
    """

    name: str
    kind: int
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weights: tuple[str, ...]
    strategies: tuple[ShardingStrategy, ...]


@dataclass(frozen=True)
class ReshardingCost:
    """Cost of bringing a tensor from the layout of its producer into the layout of a reader, per microbatch.

    Args:
        saved_bytes: part of the resharded copy that is kept for the backward in addition to the tensor itself. Copies
            inside a group count in the group's ``saved_bytes``.
    """

    forward_seconds: float
    backward_seconds: float
    saved_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward time per microbatch."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class StrategyGraph:
    """All groups in the order of a `CostGraph`; the last one is the loss, which reads everything replicated.

    A tensor is resharded once for all groups of a stage that read it in one layout, on their stage. ``resharding``
    holds every (value, producer's layout, reader's layout) that can occur with two different layouts. Groups that read
    one weight must agree on its layout. ``derived`` keeps what a solver has computed from this graph alone, by a key.
    """

    groups: tuple[StrategyGroup, ...]
    resharding: Mapping[tuple[str, Layout, Layout], ReshardingCost] = field(repr=False)
    derived: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """The entry of ``derived`` for a key, made if it is the first one."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def __post_init__(self) -> None:
        produced: set[str] = set()
        for group in self.groups:
            assert group.strategies and all(value in produced for value in group.reads), f"{group.name} reads too early"
            produced.update(group.makes)
            for strategy in group.strategies:
                assert len(strategy.input_layouts) == len(group.reads)
                assert len(strategy.output_layouts) == len(group.makes)
                assert len(strategy.weight_layouts) == len(group.weights)
