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
from autopar.cost.strategies.describe import AxisSharding, block_shardings, sharding_limits
from autopar.cost.strategies.enumerate import strategy_graph
from autopar.ir.cost_graph import CostGraph
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.layout import REPLICATED, Layout
from autopar.ir.plan_parts import BlockSharding, PriceSource, ReduceDtype, Replicas
from autopar.ir.strategies import StrategyGraph
from autopar.ir.tensor_axes import TensorAxes, TensorAxis, num_ranks
from autopar.sharding.propagate import assign
from autopar.sharding.rule import label_text
from autopar.sharding.shard_graph import shard_graph, shard_over_axis, storage, storage_on_axis
from autopar.solve.cuts.problem import Priced
from autopar.solve.cuts.step_time import Decision
from autopar.solve.shardings.solve import Shardings, pareto, proven_work_seconds, solve_shardings, work_bound_seconds

# Microbatches whose activations count when a sharding is chosen for its memory. The true number in flight differs per
# stage and is known only after the cuts.
MICROBATCHES_IN_FLIGHT = 2
MAX_OUTER_SHARDINGS = 3  # of the outer axes, with each of which the strategies of the innermost one are solved


@dataclass(frozen=True)
class Sharded:
    """A model under one sharding: strategies of operations, layouts of weights, and the graph that each rank runs.

    ``strategies`` are as `autopar.sharding.rule.axis_labels` reads them.
    """

    strategies: Mapping[str, str]
    storage: Mapping[str, Layout]
    graph: Graph
    facts: GraphStats
    segments: tuple[int, ...]


@dataclass(frozen=True)
class MeasuredConfig:
    """Configuration in which operations are timed: tensor axes, samples per microbatch, strategy labels."""

    axes: TensorAxes
    size: int
    labels: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(decision: Decision) -> MeasuredConfig:
        """Configuration of a decision."""
        return MeasuredConfig(decision.problem.tensor_axes, decision.size, sorted_labels(decision.priced.strategies))

    def distance(self, other: MeasuredConfig) -> tuple[float, float]:
        """Distance between two measured configurations: lexicographic in log2(tp), then log2(samples)."""
        return abs(log2(self.tp / other.tp)), abs(log2(self.size / other.size))

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return num_ranks(self.axes)


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
        self.unsharded_model = Sharded({}, {}, graph, self.facts, self.segments)
        self.cache: dict[tuple[Any, ...], Any] = {}

    def floor_seconds(self, axes: TensorAxes, size: int) -> float:
        """Lower bound of one microbatch's time on all stages, second: evenly split operations and free collectives.

        Once `bound_seconds` is known at other sizes, it is no less than these say: more samples take no less time, and
        no more for each sample. Ranks that divide the samples may split more than others, and measured times may
        differ more, so that these say nothing.

        Error: an estimate, not a bound, if operations were measured in another configuration.
        """
        tp, known = num_ranks(axes), {} if self.factors else self.memoized(("bounds", axes), dict)
        alike = (samples for samples in known if (samples % tp == 0) == (size % tp == 0))
        return max([self.unsharded_seconds(size) / tp, *(known[n] * min(1.0, size / n) for n in alike)])

    def unsharded_seconds(self, size: int) -> float:
        """Seconds of one microbatch on one device."""
        return self.memoized(("seconds", size), lambda: sum(g.seconds for g in self.unsharded_costs(size).groups))

    def priced(
        self, axes: TensorAxes, replicas: Replicas, size: int, microbatches: int, memory_level: int
    ) -> Priced | None:
        """Costs of the model under one sharding; see `autopar.solve.cuts.problem.Costs`."""
        if not axes:
            if memory_level:
                return None
            return self.memoized(("unsharded", replicas, size), self.unsharded, replicas, size)
        found = self.sharding(axes, size, microbatches, memory_level)
        if found is None:
            return None
        of = found.strategy_index, axes, replicas, size
        return self.memoized(("strategies", *of), self.priced_strategies, *of)

    def bound_seconds(self, axes: TensorAxes, size: int) -> float:
        """Lower bound by the prices of single strategies, second; see `autopar.solve.cuts.problem.Costs`."""
        if not axes:
            return self.unsharded_seconds(size)
        known = self.memoized(("bounds", axes), dict)
        if size not in known:
            known[size] = work_bound_seconds(self.strategy_graph(axes, size))
        return known[size]

    def proven_seconds(self, axes: TensorAxes, size: int) -> float:
        """Lower bound over all shardings of one microbatch, second; see `autopar.solve.cuts.problem.Costs`."""
        if len(axes) != 1:
            return self.unsharded_seconds(size) / num_ranks(axes)
        return self.memoized(("proven", axes, size), proven_work_seconds, self.strategy_graph(axes, size))

    def keeping(self, priced: Priced, axes: TensorAxes, replicas: Replicas, size: int, kept: frozenset[str]) -> Priced:
        """The model under ZeRO-3 with other kept blocks; see `autopar.solve.cuts.problem.Costs`."""
        if not axes:
            return self.unsharded(replicas, size, kept)
        return self.priced_strategies(priced.strategy_index, axes, replicas, size, kept)

    def unsharded(self, replicas: Replicas, size: int, kept: frozenset[str] = frozenset()) -> Priced:
        """Costs of the model with one device per stage and replica."""
        sharing = replace(self.sharing((), replicas), kept=kept)
        return Priced(self.with_sharing(self.unsharded_costs(size), self.graph, sharing), kept=kept)

    def with_sharing(self, cost: CostGraph, graph: Graph, sharing: Sharing) -> CostGraph:
        """As `with_weight_sharing`, whose weights are made once for all sizes of a microbatch."""
        if sharing.replicas.zero == 3:
            return with_weight_sharing(cost, graph, sharing, self.hardware)
        used = tuple((w.groups, w.has_fused_wgrad) for w in cost.weights)
        key = ("weights", id(graph), sharing.tp, sharing.replicas, used)  # graphs are cached, as shardings are
        weights = self.memoized(key, lambda: with_weight_sharing(cost, graph, sharing, self.hardware).weights)
        return replace(cost, weights=weights)

    def sharing(self, axes: TensorAxes, replicas: Replicas) -> Sharing:
        """Sharing of replicated weights among the ranks of a stage."""
        return Sharing(num_ranks(axes), replicas, reduce_dtype=self.reduce_dtype, axes=axes)

    def priced_strategies(
        self,
        strategy_index: tuple[int, ...],
        axes: TensorAxes,
        replicas: Replicas,
        size: int,
        kept: frozenset[str] = frozenset(),
    ) -> Priced:
        """Costs of the model under the strategies of these indices, one per group."""
        sharded = self.sharded(axes, size, strategy_index)
        sharing = replace(self.sharing(axes, replicas), storage=sharded.storage, kept=kept)
        return Priced(
            cost=self.with_sharing(self.sharded_costs(sharded, axes, size), sharded.graph, sharing),
            strategies=sharded.strategies,
            storage=sharded.storage,
            strategy_index=strategy_index,
            blocks=partial(self.blocks, axes, size, strategy_index),
            notes=sharding_limits(self.graph, self.facts, num_ranks(axes)) if not sharded.strategies else (),
            kept=kept,
        )

    def unsharded_costs(self, size: int) -> CostGraph:
        """Costs of the unsharded model on one device."""
        factors = self.factors_near(MeasuredConfig((), size))
        key = ("whole", size)
        return self.memoized(key, priced_with_segments, self.pricing((), size), self.segments, factors=factors)

    def sharded_costs(self, sharded: Sharded, axes: TensorAxes, size: int) -> CostGraph:
        """Costs of the graph that each rank runs of a sharded model, without data parallelism."""
        sharing, groups = (
            Sharing(num_ranks(axes), storage=sharded.storage, axes=axes),
            self.unsharded_costs(size).groups,
        )
        key = ("local", id(sharded), size)  # shardings are cached, so ids are not reused
        pricing = Pricing(sharded.graph, sharded.facts, self.hardware, size, axes)
        factors = self.factors_near(MeasuredConfig(axes, size, sorted_labels(sharded.strategies)))
        return self.memoized(
            key, priced_with_segments, pricing, sharded.segments, sharing=sharing, groups=groups, factors=factors
        )

    def strategy_graph(self, axes: TensorAxes, size: int) -> StrategyGraph:
        """Strategies of every group over the innermost axis, with their costs, of the graph that `outer` chose."""
        return self.strategies_inside(axes, size, self.outer(axes, size))

    def strategies_inside(self, axes: TensorAxes, size: int, outside: Sharded) -> StrategyGraph:
        """As `strategy_graph`, of a model that is sharded over the outer axes."""
        key = ("choices", axes, size, id(outside))  # shardings are cached, so ids are not reused
        if key not in self.cache:
            factors = self.factors_near(MeasuredConfig(axes, size))
            grouped = self.memoized(("grouped", axes, id(outside)), dict)  # what all sizes share
            groups = self.unsharded_costs(size).groups if len(axes) > 1 else None
            self.cache[key] = strategy_graph(self.pricing_inside(axes, size, outside), factors, grouped, groups)
        return self.cache[key]

    def outer(self, axes: TensorAxes, size: int) -> Sharded:
        """The model sharded over all axes but the innermost.

        Of the first shardings without the innermost axis, from the fastest to smaller ones, it is the one with which
        the strategies of that axis make the fastest.
        """
        if len(axes) < 2:
            return self.unsharded_model
        return self.memoized(("outer", axes, size), self.choose_outer, axes, size)

    def choose_outer(self, axes: TensorAxes, size: int) -> Sharded:
        """As `outer`, not remembered."""
        levels = (self.sharding(axes[:-1], size, 1, level) for level in range(MAX_OUTER_SHARDINGS))
        found = [self.sharded(axes[:-1], size, own.strategy_index) for own in levels if own is not None]

        def seconds(outside: Sharded) -> float:
            return solve_shardings(self.strategies_inside(axes, size, outside), 1).objective_seconds

        return min(found, key=seconds)

    def pricing(self, axes: TensorAxes, size: int) -> Pricing:
        """The graph of the outer axes, to be priced for a microbatch of ``size`` samples."""
        return self.pricing_inside(axes, size, self.outer(axes, size))

    def pricing_inside(self, axes: TensorAxes, size: int, outside: Sharded) -> Pricing:
        """As `pricing`, of a model that is sharded over the outer axes."""
        key = ("pricing", axes, id(outside))
        first = self.memoized(key, Pricing, outside.graph, outside.facts, self.hardware, size, axes)
        return first.at(size)

    def sharding(self, axes: TensorAxes, size: int, microbatches: int, memory_level: int) -> Shardings | None:
        """The fastest sharding at level 0, then ever smaller and slower ones; None after the smallest."""
        in_flight = min(microbatches, MICROBATCHES_IN_FLIGHT)
        key = ("shardings", axes, size, microbatches)
        if key not in self.cache:  # lazy: solves a program for each
            solutions = pareto(self.strategy_graph(axes, size), microbatches, in_flight)
            self.cache[key] = LazySolutions(solutions)
        return self.cache[key].at(memory_level)

    def sharded(self, axes: TensorAxes, size: int, strategy_index: tuple[int, ...]) -> Sharded:
        """The model sharded by the strategies of these indices, one per group."""
        groups, outside = self.strategy_graph(axes, size).groups, self.outer(axes, size)
        labels = dict(pair for group, i in zip(groups, strategy_index) for pair in group.strategies[i].labels)
        key = ("sharded", axes, id(outside), sorted_labels(labels))
        return self.memoized(key, sharded_further, outside, labels, axes[-1], self.hardware)

    def blocks(self, axes: TensorAxes, size: int, strategy_index: tuple[int, ...]) -> tuple[BlockSharding, ...]:
        """As `sharded`, in words: the sharding of each kind of block, for the printed plan."""
        own = self.sharded(axes, size, strategy_index)
        levels = [AxisSharding(self.pricing(axes, size), own.graph, own.storage)]
        for number in range(len(axes) - 1, 0, -1):
            outside = self.outer(axes[: number + 1], size)
            levels.insert(0, AxisSharding(self.pricing(axes[:number], size), outside.graph, outside.storage))
        return block_shardings(levels)

    def memoized(self, key: tuple[Any, ...], make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
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

    def timed(self, config: MeasuredConfig) -> Sharded:
        """The sharded model whose regions are timed; the unsharded model for one rank."""
        if not config.axes:
            return self.unsharded_model
        key = ("sharded", config.axes, config.labels)
        return self.memoized(key, apply_strategies, self.graph, dict(config.labels), config.axes, self.hardware)

    def source(self, config: MeasuredConfig) -> PriceSource:
        """Source of the prices of a configuration: "mixed" where some of its operations were not timed in it."""
        if not self.factors:
            return "analytic"
        timed = self.factors.get(config, {})
        ops = self.timed(config).graph.ops
        return "measured" if all(op.name in timed or is_collective(op) for op in ops) else "mixed"

    def use_measurements(self, config: MeasuredConfig, times: MeasuredRegions) -> None:
        """Scale prices to a measurement from now on."""
        own = self.timed(config)
        pricing = Pricing(own.graph, own.facts, self.hardware, config.size, config.axes)
        self.factors[config] = measured_factors(pricing, times)
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


def apply_strategies(graph: Graph, strategies: Mapping[str, str], axes: TensorAxes, hardware: Hardware) -> Sharded:
    """A model sharded by strategies of its operations, on a single stage."""
    ranks = {axis.name: axis.ranks for axis in axes}
    stored = storage(graph, strategies, ranks)
    local = shard_graph(graph, strategies, stored, ranks, dict.fromkeys((op.name for op in graph.ops), 0))
    return Sharded(strategies, stored, local, *facts_and_segments(local, hardware))


def sharded_further(outside: Sharded, labels: Mapping[str, str], axis: TensorAxis, hardware: Hardware) -> Sharded:
    """A model that is sharded over some axes, sharded by labels of its operations over the next one."""
    graph = outside.graph
    labels = dict(labels) if any(labels.values()) else {}
    stored = storage_on_axis(graph, labels, axis)
    followed = assign(graph, labels, stored, axis)
    outer_collectives = (op.name for op in graph.ops if op.home and op.name in followed.rules)
    labels |= {name: followed.strategies[name].label for name in outer_collectives if labels}
    local = shard_over_axis(graph, labels, stored, axis, dict.fromkeys((op.name for op in graph.ops), 0))
    texts = {
        name: f"{outside.strategies.get(name, '')} {label_text({axis.name: labels[name]})}".strip()
        if name in labels
        else outside.strategies[name]
        for name in (*outside.strategies, *labels)
    }
    layouts = {name: outside.storage.get(name, REPLICATED).then(layout) for name, layout in stored.items()}
    return Sharded(texts, layouts, local, *facts_and_segments(local, hardware))


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
