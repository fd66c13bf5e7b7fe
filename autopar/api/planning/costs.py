"""Costs of a model under each sharding, as the search over meshes needs them; each is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import log2
from typing import Any

from autopar.cost.groups.cost_graph import price, with_weight_sharing
from autopar.cost.groups.recompute_segments import segment_starts
from autopar.cost.groups.saved_activations import compiled_stats
from autopar.cost.groups.segment_memory import with_segments
from autopar.cost.groups.weight_memory import Sharing
from autopar.cost.ops.collective_cost import is_collective
from autopar.cost.ops.op_cost import NO_FACTORS, Factor, Factors, MeasuredRegions, Pricing, measured_factors
from autopar.cost.ops.op_stats import GraphStats, graph_stats
from autopar.cost.strategies.describe import block_shardings, sharding_limits
from autopar.cost.strategies.enumerate import strategy_graph
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.layout import TP, Layout
from autopar.ir.plan_parts import BlockSharding, PriceSource, ReduceDtype, Replicas
from autopar.ir.strategies import StrategyGraph
from autopar.sharding.shard_graph import shard_graph, storage
from autopar.solve.cuts.problem import Priced
from autopar.solve.cuts.step_time import Decision
from autopar.solve.shardings.solve import Shardings, pareto, proven_work_seconds, work_bound_seconds

# Microbatches whose activations count when a sharding is chosen for its memory. The true number in flight differs per
# stage and is known only after the cuts.
MICROBATCHES_IN_FLIGHT = 2


@dataclass(frozen=True)
class Sharded:
    """A model under one sharding: strategies of operations, layouts of weights, and the graph that each rank runs."""

    strategies: Mapping[str, str]
    storage: Mapping[str, Layout]
    graph: Graph
    facts: GraphStats
    segments: tuple[int, ...]


@dataclass(frozen=True)
class MeasuredConfig:
    """Configuration in which operations are timed: tensor-parallel ranks, samples per microbatch, strategy labels."""

    tp: int
    size: int
    labels: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(decision: Decision) -> MeasuredConfig:
        """Configuration of a decision."""
        return MeasuredConfig(decision.problem.tp, decision.size, sorted_labels(decision.priced.strategies))

    def distance(self, other: MeasuredConfig) -> tuple[float, float]:
        """Distance between two measured configurations: lexicographic in log2(tp), then log2(samples)."""
        return abs(log2(self.tp / other.tp)), abs(log2(self.size / other.size))


class PlanCosts:
    """Costs of one traced model on one machine.

    A sharding is chosen for a microbatch size. Its cost is then computed from the very graph that each rank would run,
    collectives included: what is compared is what will run.
    """

    def __init__(self, graph: Graph, hardware: Hardware, reduce_dtype: ReduceDtype = "float32") -> None:
        self.graph, self.hardware = graph, hardware
        self.reduce_dtype: ReduceDtype = reduce_dtype
        self.factors: dict[MeasuredConfig, Factors] = {}
        self.facts, self.segments = facts_and_segments(graph, hardware)
        self.cache: dict[tuple, Any] = {}

    def floor_seconds(self, tp: int, size: int) -> float:
        """Lower bound of one microbatch's time on all stages, second: evenly split operations and free collectives.

        Once `bound_seconds` is known at other sizes, it is no less than these say: more samples take no less time, and
        no more for each sample. Ranks that divide the samples may split more than others, and measured times may
        differ more, so that these say nothing.

        Error: an estimate, not a bound, if operations were measured in another configuration.
        """
        known = {} if self.factors else self.memoized(("bounds", tp), dict)
        alike = (samples for samples in known if (samples % tp == 0) == (size % tp == 0))
        return max([self.unsharded_seconds(size) / tp, *(known[n] * min(1.0, size / n) for n in alike)])

    def unsharded_seconds(self, size: int) -> float:
        """Seconds of one microbatch on one device."""
        return self.memoized(("seconds", size), lambda: sum(g.seconds for g in self.unsharded_costs(size).groups))

    def priced(self, tp: int, replicas: Replicas, size: int, microbatches: int, memory_level: int) -> Priced | None:
        """Costs of the model under one sharding; see `autopar.solve.cuts.problem.Costs`."""
        if tp == 1:
            if memory_level:
                return None
            return self.memoized(("unsharded", replicas, size), self.unsharded, replicas, size)
        found = self.sharding(tp, size, microbatches, memory_level)
        if found is None:
            return None
        of = found.strategy_index, tp, replicas, size
        return self.memoized(("strategies", *of), self.priced_strategies, *of)

    def bound_seconds(self, tp: int, size: int) -> float:
        """Lower bound by the prices of single strategies, second; see `autopar.solve.cuts.problem.Costs`."""
        if tp == 1:
            return self.unsharded_seconds(size)
        known = self.memoized(("bounds", tp), dict)
        if size not in known:
            known[size] = work_bound_seconds(self.strategy_graph(tp, size))
        return known[size]

    def proven_seconds(self, tp: int, size: int) -> float:
        """Lower bound over all shardings of one microbatch, second; see `autopar.solve.cuts.problem.Costs`."""
        if tp == 1:
            return self.unsharded_seconds(size)
        return self.memoized(("proven", tp, size), proven_work_seconds, self.strategy_graph(tp, size))

    def keeping(self, priced: Priced, tp: int, replicas: Replicas, size: int, kept: frozenset[str]) -> Priced:
        """The model under ZeRO-3 with other kept blocks; see `autopar.solve.cuts.problem.Costs`."""
        if tp == 1:
            return self.unsharded(replicas, size, kept)
        return self.priced_strategies(priced.strategy_index, tp, replicas, size, kept)

    def unsharded(self, replicas: Replicas, size: int, kept: frozenset[str] = frozenset()) -> Priced:
        """Costs of the model with one device per stage and replica."""
        sharing = replace(self.sharing(1, replicas), kept=kept)
        return Priced(self.with_sharing(self.unsharded_costs(size), self.graph, sharing), kept=kept)

    def with_sharing(self, cost: CostGraph, graph: Graph, sharing: Sharing) -> CostGraph:
        """As `with_weight_sharing`, whose weights are made once for all sizes of a microbatch."""
        if sharing.replicas.zero == 3:
            return with_weight_sharing(cost, graph, sharing, self.hardware)
        used = tuple((w.groups, w.has_fused_wgrad) for w in cost.weights)
        key = ("weights", id(graph), sharing.tp, sharing.replicas, used)  # graphs are cached, as shardings are
        weights = self.memoized(key, lambda: with_weight_sharing(cost, graph, sharing, self.hardware).weights)
        return replace(cost, weights=weights)

    def sharing(self, tp: int, replicas: Replicas) -> Sharing:
        """Sharing of replicated weights among the ranks of a stage."""
        return Sharing(tp, replicas, reduce_dtype=self.reduce_dtype)

    def priced_strategies(
        self,
        strategy_index: tuple[int, ...],
        tp: int,
        replicas: Replicas,
        size: int,
        kept: frozenset[str] = frozenset(),
    ) -> Priced:
        """Costs of the model under the strategies of these indices, one per group."""
        sharded = self.sharded(tp, size, strategy_index)
        sharing = replace(self.sharing(tp, replicas), storage=sharded.storage, kept=kept)
        return Priced(
            cost=self.with_sharing(self.sharded_costs(sharded, tp, size), sharded.graph, sharing),
            strategies=sharded.strategies,
            storage=sharded.storage,
            strategy_index=strategy_index,
            blocks=partial(self.blocks, tp, size, strategy_index),
            notes=sharding_limits(self.graph, self.facts, tp) if not sharded.strategies else (),
            kept=kept,
        )

    def unsharded_costs(self, size: int) -> CostGraph:
        """Costs of the unsharded model on one device."""
        factors = self.factors_near(MeasuredConfig(1, size))
        key = ("whole", size)
        return self.memoized(key, priced_with_segments, self.pricing(1, size), self.segments, factors=factors)

    def sharded_costs(self, sharded: Sharded, tp: int, size: int) -> CostGraph:
        """Costs of the graph that each rank runs of a sharded model, without data parallelism."""
        sharing, groups = Sharing(tp, storage=sharded.storage), self.unsharded_costs(size).groups
        key = ("local", id(sharded), size)  # shardings are cached, so ids are not reused
        pricing = Pricing(sharded.graph, sharded.facts, self.hardware, size, tp)
        factors = self.factors_near(MeasuredConfig(tp, size, sorted_labels(sharded.strategies)))
        return self.memoized(
            key, priced_with_segments, pricing, sharded.segments, sharing=sharing, groups=groups, factors=factors
        )

    def strategy_graph(self, tp: int, size: int) -> StrategyGraph:
        """Strategies of every group over ``tp`` ranks, with their costs."""
        factors = self.factors_near(MeasuredConfig(tp, size))
        grouped = self.memoized(("grouped", tp), dict)  # what all sizes share
        return self.memoized(("choices", tp, size), strategy_graph, self.pricing(tp, size), factors, grouped)

    def pricing(self, tp: int, size: int) -> Pricing:
        """The unsharded graph, to be priced for ``tp`` ranks and a microbatch of ``size`` samples."""
        first = self.memoized(("pricing", tp), Pricing, self.graph, self.facts, self.hardware, size, tp)
        return first.at(size)

    def sharding(self, tp: int, size: int, microbatches: int, memory_level: int) -> Shardings | None:
        """The fastest sharding at level 0, then ever smaller and slower ones; None after the smallest."""
        in_flight = min(microbatches, MICROBATCHES_IN_FLIGHT)
        solutions = pareto(self.strategy_graph(tp, size), microbatches, in_flight)  # lazy: solves a program for each
        return self.memoized(("shardings", tp, size, microbatches), LazySolutions, solutions).at(memory_level)

    def sharded(self, tp: int, size: int, strategy_index: tuple[int, ...]) -> Sharded:
        """The model sharded by the strategies of these indices, one per group."""
        groups = self.strategy_graph(tp, size).groups
        labels = tuple(pair for group, i in zip(groups, strategy_index) for pair in group.strategies[i].labels)
        return self.shard(dict(labels), tp)

    def blocks(self, tp: int, size: int, strategy_index: tuple[int, ...]) -> tuple[BlockSharding, ...]:
        """As `sharded`, in words: the sharding of each kind of block, for the printed plan."""
        own = self.sharded(tp, size, strategy_index)
        return block_shardings(self.pricing(tp, size), own.graph, own.storage)

    def shard(self, labels: Mapping[str, str], tp: int) -> Sharded:
        """The model sharded by strategy labels of its operations."""
        key = ("sharded", tp, sorted_labels(labels))
        return self.memoized(key, apply_strategies, self.graph, labels, tp, self.hardware)

    def memoized(self, key: tuple, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The cached result of ``make(…)`` for a key."""
        if key not in self.cache:
            self.cache[key] = make(*arguments, **named)
        return self.cache[key]

    # -- measurements --------------------------------------------------------------------------------------------

    def factors_near(self, config: MeasuredConfig) -> Factors:
        """Ratios of measured to priced times: of each operation from this configuration, or from the nearest one in
        which it was measured."""
        if not self.factors:
            return NO_FACTORS
        distances = {known: (known != config, *config.distance(known)) for known in self.factors}
        factors: dict[str, Factor] = {}
        for known in sorted(self.factors, key=distances.__getitem__, reverse=True):
            factors |= self.factors[known]
        return factors

    def timed(self, labels: Mapping[str, str], tp: int) -> Sharded:
        """The sharded model whose regions are timed; the unsharded model for one rank."""
        if tp == 1:
            return Sharded({}, {}, self.graph, self.facts, self.segments)
        return self.shard(labels, tp)

    def source(self, config: MeasuredConfig) -> PriceSource:
        """Source of the prices of a configuration: "mixed" where some of its operations were not timed in it."""
        if not self.factors:
            return "analytic"
        timed = self.factors.get(config, {})
        ops = self.timed(dict(config.labels), config.tp).graph.ops
        return "measured" if all(op.name in timed or is_collective(op) for op in ops) else "mixed"

    def use_measurements(self, config: MeasuredConfig, times: MeasuredRegions) -> None:
        """Scale prices to a measurement from now on."""
        tp, size = config.tp, config.size
        own = self.timed(dict(config.labels), tp)
        self.factors[config] = measured_factors(Pricing(own.graph, own.facts, self.hardware, size, tp), times)
        self.cache = {key: value for key, value in self.cache.items() if key[0] == "sharded"}


def sorted_labels(strategies: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Strategy labels in the order in which `MeasuredConfig` holds them."""
    return tuple(sorted(strategies.items()))


class LazySolutions:
    """A lazy sequence of solutions that keeps those already computed."""

    def __init__(self, source: Iterator[Shardings]) -> None:
        self.source, self.solutions = source, list[Shardings]()

    def at(self, number: int) -> Shardings | None:
        """The solution at an index, or None if there are fewer."""
        self.solutions.extend(islice(self.source, max(0, number + 1 - len(self.solutions))))
        return self.solutions[number] if number < len(self.solutions) else None


def apply_strategies(graph: Graph, labels: Mapping[str, str], tp: int, hardware: Hardware) -> Sharded:
    """A model sharded by strategy labels of its operations, on a single stage."""
    ranks = {TP: tp}
    stored = storage(graph, labels, ranks)
    local = shard_graph(graph, labels, stored, ranks, dict.fromkeys((op.name for op in graph.ops), 0))
    strategies = labels if any(labels.values()) else {}
    return Sharded(strategies, stored, local, *facts_and_segments(local, hardware))


def facts_and_segments(graph: Graph, hardware: Hardware) -> tuple[GraphStats, tuple[int, ...]]:
    """Statistics of a graph's operations as the machine runs them, and the operations at which segments begin.

    Segments are those of the uncompiled graph: compilation must not move them.
    """
    facts, device_type = graph_stats(graph, hardware.device_type), hardware.device_type
    run = compiled_stats(graph, facts, device_type) if hardware.execution_mode.compiled else facts
    return run, segment_starts(graph, facts)


def priced_with_segments(pricing: Pricing, starts: tuple[int, ...], **named: Any) -> CostGraph:
    """As `price`, with the costs of stages that recompute their activations."""
    return with_segments(price(pricing, **named), pricing, starts)
