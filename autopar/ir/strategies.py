"""How a model can be sharded: the choices of every group and what each costs. The input of the sharding solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.layout import Layout


@dataclass(frozen=True)
class ShardingStrategy:
    """One way to run a group on the ranks of a tensor-parallel axis.

    Times are per microbatch on each rank, collectives inside the group included; ``step_seconds`` is spent once a step
    (summing the gradients of weights that are replicated and read on split data). ``weight_bytes`` holds value,
    gradient and optimizer state of a rank's part.

    Args:
        labels: the strategy of every operation of the group that is not replicated, by name.
        takes: the layout in which it reads each of ``StrategyGroup.reads``.
        gives: the layout of each of ``StrategyGroup.makes``; never partial.
        stores: the layout of each of ``StrategyGroup.weights``.
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

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class StrategyGroup:
    """A group and its choices; the first one replicates everything. Groups of one ``kind`` share their choice.

    ``reads`` are values that other groups make, ``makes`` values that other groups read.
    """

    name: str
    kind: int
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weights: tuple[str, ...]
    strategies: tuple[ShardingStrategy, ...]


@dataclass(frozen=True)
class ReshardingCost:
    """What it costs to bring a tensor from the layout in which it is made into one in which it is read, per microbatch.

    ``saved_bytes`` of the copy that is made are kept for the backward besides the tensor itself; conversions inside a
    group have theirs in the group's.
    """

    forward_seconds: float
    backward_seconds: float
    saved_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class StrategyGraph:
    """All groups in the order of a `CostGraph`, the last one being the loss, which reads everything replicated.

    A tensor is converted once for all groups of a stage that read it in one layout, on their stage. ``conversions``
    holds every (value, made, read) that can occur with two different layouts. Groups that read one weight must agree
    on its layout.
    """

    groups: tuple[StrategyGroup, ...]
    value_bytes: Mapping[str, int]
    resharding: Mapping[tuple[str, Layout, Layout], ReshardingCost] = field(repr=False)

    def __post_init__(self) -> None:
        produced: set[str] = set()
        for group in self.groups:
            assert group.strategies and all(value in produced for value in group.reads), f"{group.name} reads too early"
            produced.update(group.makes)
            for strategy in group.strategies:
                assert len(strategy.input_layouts) == len(group.reads)
                assert len(strategy.output_layouts) == len(group.makes)
                assert len(strategy.weight_layouts) == len(group.weights)
