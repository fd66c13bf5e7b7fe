"""Cost of a given strategy for every group, and the value edges between groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.layout import Layout
from autopar.ir.strategies import ReshardingCost, ShardingStrategy, StrategyGraph

NOTHING = ReshardingCost(0.0, 0.0)


@dataclass(frozen=True)
class ObjectiveWeights:
    """Weights of the objective: seconds per microbatch, with ``memory_price`` in seconds per byte.

    With infinitely many ``microbatches``, time that is spent once a step has no weight.
    """

    microbatches: float
    memory_price: float = 0.0
    in_flight: int = 1

    def of(self, choice: ShardingStrategy) -> float:
        """seconds + step_seconds / microbatches + memory_price · (weight_bytes + in_flight · saved_bytes)."""
        memory = choice.weight_bytes + self.in_flight * choice.saved_bytes
        return choice.seconds + choice.step_seconds / self.microbatches + self.memory_price * memory

    def of_resharding(self, conversion: ReshardingCost) -> float:
        """seconds + memory_price · in_flight · saved_bytes."""
        return conversion.seconds + self.memory_price * self.in_flight * conversion.saved_bytes


@dataclass(frozen=True)
class Consumer:
    """A group that reads a value, and its layout under each of the group's strategies."""

    group: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class ValueEdge:
    """A value between groups: its producer, its layout under each of the producer's strategies, and its consumers."""

    value: str
    producer: int
    layouts: tuple[Layout, ...]
    consumers: tuple[Consumer, ...]


@dataclass(frozen=True)
class ShardingCost:
    """``seconds`` per microbatch, conversions included; ``step_seconds`` once a step; memory of the whole model."""

    seconds: float
    step_seconds: float
    memory_bytes: int


def value_edges(graph: StrategyGraph) -> tuple[ValueEdge, ...]:
    """Values that one group produces and others read, in the order of their production; made once for a graph."""
    return graph.remember("value edges", lambda: _value_edges(graph))


def _value_edges(graph: StrategyGraph) -> tuple[ValueEdge, ...]:
    consumers: dict[str, list[Consumer]] = {}
    for number, group in enumerate(graph.groups):
        for position, value in enumerate(group.reads):
            layouts = tuple(choice.input_layouts[position] for choice in group.strategies)
            consumers.setdefault(value, []).append(Consumer(number, layouts))
    return tuple(
        ValueEdge(
            value,
            number,
            tuple(choice.output_layouts[position] for choice in group.strategies),
            tuple(consumers[value]),
        )
        for number, group in enumerate(graph.groups)
        for position, value in enumerate(group.makes)
        if value in consumers
    )


def resharding_cost(graph: StrategyGraph, value: str, made: Layout, read: Layout) -> ReshardingCost:
    """Cost of resharding a value, forward and backward; zero if it is read in the layout of its producer."""
    if made == read:
        return NOTHING
    assert (value, made, read) in graph.resharding, f"no conversion of {value} from {made} to {read}"
    return graph.resharding[value, made, read]


def sharding_cost(graph: StrategyGraph, strategy_index: Sequence[int], in_flight: int) -> ShardingCost:
    """Cost of the given strategy of every group; each resharding is paid once per value and layout."""
    chosen = [group.strategies[k] for group, k in zip(graph.groups, strategy_index, strict=True)]
    reshardings: list[ReshardingCost] = []
    for edge in value_edges(graph):
        made = edge.layouts[strategy_index[edge.producer]]
        read = {consumer.layouts[strategy_index[consumer.group]] for consumer in edge.consumers}
        reshardings += (resharding_cost(graph, edge.value, made, layout) for layout in read)
    saved = sum(cost.saved_bytes for cost in (*chosen, *reshardings))
    return ShardingCost(
        seconds=sum(cost.seconds for cost in (*chosen, *reshardings)),
        step_seconds=sum(choice.step_seconds for choice in chosen),
        memory_bytes=sum(choice.weight_bytes for choice in chosen) + in_flight * saved,
    )
