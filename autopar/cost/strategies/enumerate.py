"""The strategy graph of a model: the sharding strategies of each group, and what each of them costs.

There is no rule for attention or MLPs. Column and row splits with two all-reduces per block and direction follow from
the rules of single operations; so do reduce-scatters with norms on split tokens or samples. In operations with weight
matrices, tensor parallelism does not split the samples of a microbatch, because data parallelism does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autopar.cost.fusion.least_kernels import least_traffic
from autopar.cost.groups.cost_graph import LOSS
from autopar.cost.groups.grouping import OpGroup, group_ops, group_sharded_ops
from autopar.cost.groups.weight_memory import Sharing, sharded_weight_cost, with_blocks
from autopar.cost.ops.collective_cost import reshard_step_cost, sum_costs
from autopar.cost.ops.op_cost import NO_FACTORS, UNMEASURED, Factors, OpCost, Pricing, local_op_cost, op_costs
from autopar.cost.ops.op_stats import FusedTraffic
from autopar.cost.ops.overlap import exposed_seconds, gemm_seconds
from autopar.cost.strategies.candidate_splits import candidate_splits
from autopar.cost.strategies.group_cost import GroupContext, GroupCosting, Outline, Owners, owners, saved_by
from autopar.cost.strategies.propagate import (
    GroupBoundary,
    PropagationContext,
    anchor_strategies,
    keeps_state,
    lead_layouts,
    propagate_anchor,
    reduction_targets,
)
from autopar.cost.strategies.rule_cache import RuleCache
from autopar.ir.cost_graph import Group, ResidentTensor
from autopar.ir.graph import Graph, refs
from autopar.ir.hardware import Hardware
from autopar.ir.layout import REPLICATED, Layout
from autopar.ir.strategies import ReshardingCost, ShardingStrategy, StrategyGraph, StrategyGroup
from autopar.ir.tensor_axes import num_ranks
from autopar.sharding.fuse_linear import before_layer, is_layer
from autopar.sharding.reshard import reshard_steps

MAX_STRATEGIES = 8


@dataclass(frozen=True)
class EquivalentGroups:
    """Groups that are equal but for names: one of them, its strategies, and the ``kind`` number that all share."""

    number: int
    members: OpGroup
    strategies: tuple[ShardingStrategy, ...]


@dataclass(frozen=True)
class GroupedModel:
    """The part of a model's strategy graphs that depends on no batch size, as long as the groups are the same.

    Args:
        groups: with a pricing at one of these sizes.
        keys: number of each group, equal for groups of one `GroupContext.signature`.
        shapes: of each key, number of the part of its signature that is equal for groups of one kind.
        outlines: of each key, the strategies of its first group.
    """

    groups: tuple[GroupContext, ...]
    keys: tuple[int, ...]
    shapes: tuple[int, ...]
    outlines: tuple[tuple[Outline, ...], ...]


# Grouped models by whether samples may be split and the names of the operations of each group.
GroupedModels = dict[tuple[bool, tuple[tuple[str, ...], ...]], GroupedModel]


def strategy_graph(
    pricing: Pricing,
    factors: Factors = NO_FACTORS,
    known: GroupedModels | None = None,
    groups: tuple[Group, ...] | None = None,
) -> StrategyGraph:
    """Sharding strategies of every group of a training graph on the ranks of a tensor axis.

    The graph is unsharded, or that of a rank of the axes outside. The groups are the same as `price` makes. A strategy
    splits the group's anchor, and the other operations follow it. If the anchor's output is partial, a strategy also
    says to which layout it is reduced. Groups are of one kind if their anchors stand at the same place of a repeated
    block, and their operations, shapes and neighbours are equal.

    Args:
        pricing: of the graph, whose last axis has at least 2 ranks.
        factors: as in `price`; equivalent groups get the factors of the first of them.
        known: what other batch sizes of this graph on as many ranks left, and what this one leaves.
        groups: groups of the unsharded graph, for a graph of the axes outside; by default they are made here.
    Raises:
        HardwareError: the machine has no peak for a dtype that the model computes in.
    Error: compared with `price` of the local graph of a sharding; see `autopar.cost.strategies.group_cost`.
    """
    graph = pricing.graph
    costs = op_costs(pricing)
    seconds = {name: cost.forward_seconds + cost.backward_seconds for name, cost in costs.items()}
    if groups is None:
        grouped_ops = group_ops(graph, seconds, {name: cost.flops for name, cost in costs.items()})
    else:
        grouped_ops = group_sharded_ops(graph, [group for group in groups if group.ops])
    ranks = num_ranks(pricing.axes)
    batch_divides = pricing.batch % ranks == 0 and graph.batch % ranks == 0
    known = {} if known is None else known
    place = batch_divides, tuple(tuple(op.name for op in members.ops) for members in grouped_ops)
    if place not in known:
        known[place] = grouped_model(pricing, grouped_ops, batch_divides)
    grouped = known[place]
    first = grouped.groups[0]
    least, context = first.least.at(pricing.batch), replace(first.context, factors=factors)
    prices, part_costs = first.pricing.at(pricing.batch), dict[tuple, OpCost]()
    kinds: dict[int, EquivalentGroups] = {}
    numbers: dict[tuple, int] = {}
    strategies: list[StrategyGroup] = []
    for key, shared in zip(grouped.keys, grouped.groups):
        members, boundary = shared.members, shared.boundary
        if key not in kinds:
            group = replace(shared, context=context, pricing=prices, least=least, known=part_costs)
            found = group_strategies(group, grouped.outlines[key])
            alike = grouped.shapes[key], without_names(found, members)
            kinds[key] = EquivalentGroups(numbers.setdefault(alike, len(numbers)), members, found)
        kind = kinds[key]
        renamed = tuple(rename(kind.strategies, kind.members, members))
        strategies.append(
            StrategyGroup(members.anchor.name, kind.number, boundary.reads, boundary.makes, boundary.weights, renamed)
        )
    strategies.append(loss_group(graph, len(numbers)))
    resharding = resharding_costs(strategies, grouped_ops, first.owners, prices, context)
    return StrategyGraph(tuple(strategies), resharding)


def grouped_model(pricing: Pricing, groups: Sequence[OpGroup], batch_divides: bool) -> GroupedModel:
    """The part of strategy graphs that other batch sizes reuse."""
    graph = pricing.graph
    # Where the ranks divide the samples, regions between products split these: as good as tokens, and never ragged.
    book = RuleCache(graph, pricing.stats, pricing.axis, ragged=not batch_divides)
    context = PropagationContext(book, candidate_splits(book, batch_divides), batch_divides)
    owned = owners(groups, pricing)
    contexts = [
        GroupContext(number, members, boundary, context, pricing, pricing, owned)
        for number, (members, boundary) in enumerate(zip(groups, group_boundaries(groups, graph)))
    ]
    signatures = [group.signature() for group in contexts]
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
    keys = tuple(numbers[signature] for signature in signatures)
    equal: list[list[GroupContext]] = [[] for _ in numbers]
    for key, group in zip(keys, contexts):
        equal[key].append(group)
    least = least_pricing(pricing, [[group.members for group in own] for own in equal])
    shapes = {shape: number for number, shape in enumerate(dict.fromkeys(signature[:3] for signature in numbers))}
    return GroupedModel(
        tuple(replace(group, least=least) for group in contexts),
        keys,
        tuple(shapes[signature[:3]] for signature in numbers),
        tuple(tuple(outlines(own[0])) for own in equal),
    )


def with_replicas(choices: StrategyGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> StrategyGraph:
    """The strategy graph with the weights' costs for data-parallel replicas, as `price` counts them.

    ``step_seconds`` then include what replicas exchange, and ``weight_bytes`` follow the ZeRO stage.

    Args:
        choices: a strategy graph without replicas.
        graph: the unsharded graph.
        sharing: numbers of ranks; its ``storage`` is not read, since each strategy says how it stores weights.
    """
    return with_weights(
        choices, graph, sharing, hardware, lambda w: w.optimizer_seconds + w.reduce_seconds + w.gather_seconds
    )


def with_hidden_exchange(choices: StrategyGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> StrategyGraph:
    """As `with_replicas`, where passes hide all that replicas exchange."""
    return with_weights(choices, graph, sharing, hardware, lambda w: w.optimizer_seconds)


def with_weights(
    choices: StrategyGraph,
    graph: Graph,
    sharing: Sharing,
    hardware: Hardware,
    step_seconds: Callable[[ResidentTensor], float],
) -> StrategyGraph:
    """The strategy graph with the weights' costs for replicas, of which some seconds count."""
    if sharing.replicas.dp == 1:
        return choices
    charged, sharing = set[str](), with_blocks(sharing, graph)

    def shared(group: StrategyGroup, choice: ShardingStrategy) -> ShardingStrategy:
        stored = {name: layout for name, layout in zip(group.weights, choice.weight_layouts) if name not in charged}
        here = replace(sharing, storage=stored)
        weight_costs = [sharded_weight_cost(graph.weight[name], (0,), here, hardware) for name in stored]
        seconds = sum(map(step_seconds, weight_costs))
        return replace(choice, step_seconds=seconds, weight_bytes=sum(h.num_bytes for h in weight_costs))

    groups = []
    for group in choices.groups:
        groups.append(replace(group, strategies=tuple(shared(group, choice) for choice in group.strategies)))
        charged.update(group.weights)
    return replace(choices, groups=tuple(groups))


def least_pricing(pricing: Pricing, equal_groups: Iterable[Sequence[OpGroup]]) -> Pricing:
    """The pricing with `least_traffic`, where that is one for all operations at the same place of equal groups."""
    if not pricing.stats.traffic:
        return pricing
    traffic = dict(least_traffic(pricing.graph, pricing.stats))
    for groups in equal_groups:
        for ops in zip(*(group.ops for group in groups), strict=True):
            if len({traffic[op.name] for op in ops}) > 1:
                traffic |= dict.fromkeys((op.name for op in ops), FusedTraffic())
    return replace(pricing, stats=replace(pricing.stats, traffic=traffic))


def group_boundaries(groups: Sequence[OpGroup], graph: Graph) -> tuple[GroupBoundary, ...]:
    """Boundary of each group: values read from and made for other groups, and weights, in order of execution."""
    group_of = {op.name: i for i, members in enumerate(groups) for op in members.ops}
    outside = set(refs(graph.outputs))
    for op in graph.ops:
        for name in op.reads:
            source = graph.producer.get(name)
            if source is not None and group_of[source.name] != group_of[op.name]:
                outside.add(name)
    found = []
    for members in groups:
        own = {v.name for op in members.ops for v in op.outputs}
        read = dict.fromkeys(name for op in members.ops for name in op.reads)
        found.append(
            GroupBoundary(
                reads=tuple(n for n in read if n in graph.producer and n not in own),
                makes=tuple(v.name for op in members.ops for v in op.outputs if v.name in outside),
                weights=tuple(n for n in read if n in graph.weight),
            )
        )
    return tuple(found)


def loss_group(graph: Graph, kind: int) -> StrategyGroup:
    """The loss, a group with one strategy: it reads the model's outputs replicated."""
    names = tuple(dict.fromkeys(refs(graph.outputs)))
    reads = tuple(n for n in names if n in graph.producer)
    weights = tuple(n for n in names if n in graph.weight)
    only = ShardingStrategy(
        "replicated", (), 0.0, 0.0, 0.0, 0, 0, (REPLICATED,) * len(reads), (), (REPLICATED,) * len(weights)
    )
    return StrategyGroup(LOSS, kind, reads, (), weights, (only,))


def resharding_costs(
    groups: Sequence[StrategyGroup],
    members: Sequence[OpGroup],
    owned: Owners,
    pricing: Pricing,
    context: PropagationContext,
) -> Mapping[tuple[str, Layout, Layout], ReshardingCost]:
    """Cost of every resharding that can occur, by (value, layout that is made, layout that is read).

    Error: over-counts. A resharded copy counts as saved for backward if any strategy of any saving consumer reads that
        layout.
    """
    book, layers = context.book, dict(sole_reader_layers(pricing, context.factors))
    copies = saved_copies(groups, members, owned, pricing)
    output_layouts: dict[str, set[Layout]] = {}
    known: dict[tuple, ReshardingCost] = {}
    costs: dict[tuple[str, Layout, Layout], ReshardingCost] = {}
    ranks = {pricing.axis.name: pricing.ranks}
    for group in groups:
        for i, name in enumerate(group.reads):
            num_bytes, trained, layer = pricing.num_bytes(name), name in book.trained, layers.get(name)
            for read in dict.fromkeys(choice.input_layouts[i] for choice in group.strategies):
                for made in output_layouts[name]:
                    if made == read:
                        continue
                    copied = (name, read) in copies and bool(made.splits or read.splits)
                    share = read.largest_share(book.graph.shapes[name], ranks) if copied else 0
                    saved = round(num_bytes * share)
                    key = (made, read, num_bytes, trained, layer, saved)
                    if key not in known:
                        seconds = resharding_cost(made, read, num_bytes, trained, layer, pricing)
                        known[key] = replace(seconds, saved_bytes=saved)
                    costs[name, made, read] = known[key]
        for i, name in enumerate(group.makes):
            output_layouts[name] = {choice.output_layouts[i] for choice in group.strategies}
    return costs


def saved_copies(
    groups: Sequence[StrategyGroup], members: Sequence[OpGroup], owned: Owners, pricing: Pricing
) -> frozenset[tuple[str, Layout]]:
    """(value, layout) of copies that a consumer may save besides the original.

    The original is saved by the group that makes the value, or by an earlier group.
    """
    maker = {name: number for number, group in enumerate(groups) for name in group.makes}
    found: set[tuple[str, Layout]] = set()
    for group, own in zip(groups, members):  # the loss, last of ``groups``, saves nothing
        roots = {root for op in own.ops for root, _ in saved_by(op, pricing)}
        for i, name in enumerate(group.reads):
            root = pricing.storage.get(name, name)
            if root in roots and owned.saved[root] <= maker[name]:
                found.update((name, choice.input_layouts[i]) for choice in group.strategies)
    return frozenset(found)


def resharding_cost(
    made: Layout, read: Layout, num_bytes: float, trained: bool, layer: ReshardingCost | None, pricing: Pricing
) -> ReshardingCost:
    """Seconds to bring a tensor from one layout into another, and its gradient back.

    Args:
        num_bytes: size of the unsharded tensor, byte.
        trained: whether the tensor has a gradient.
        layer: GEMM seconds of the linear layer that alone reads it, if there is one; the last step overlaps with it.
    """
    *first, last = reshard_steps(made, read, pricing.axis.name, pricing.ranks)
    parts = [reshard_step_cost(step, num_bytes, trained, pricing.hardware, pricing.axis) for step in (*first, last)]
    operator = before_layer(last, trained)
    if operator is not None and layer is not None:
        parts[-1] = exposed_seconds(operator, layer, parts[-1], pricing.ranks, pricing.hardware)
    return sum_costs(parts)


def sole_reader_layers(pricing: Pricing, factors: Factors) -> Iterator[tuple[str, ReshardingCost]]:
    """(value, GEMM seconds) for each value whose only reader is a linear layer.

    The layer is taken as column-parallel, since `autopar.sharding.fuse_linear` fuses collectives before such layers.
    """
    graph = pricing.graph
    readers = Counter([*(name for op in graph.ops for name in op.reads), *refs(graph.outputs)])
    for op in graph.ops:
        if is_layer(op) and readers[op.reads[0]] == 1:
            whole = op.reads[0]

            def num_bytes(name: str, whole: str = whole) -> float:
                return pricing.num_bytes(name) / (1 if name == whole else pricing.ranks)

            cost = local_op_cost(op, pricing, num_bytes, pricing.ranks).scaled_by(factors.get(op.name, UNMEASURED))
            yield whole, gemm_seconds(op, cost, pricing.stats)


# -- strategies of one group ---------------------------------------------------------------------------------------


def outlines(group: GroupContext) -> Iterator[Outline]:
    """Strategies of a group before they are priced, the replicated one first."""
    members, context = group.members, group.context
    for strategy in anchor_strategies(members, context):
        for target, lead in product(reduction_targets(members, strategy, context), lead_layouts(members, context)):
            sharding = propagate_anchor(members, strategy, target, context, lead)
            if keeps_state(members, sharding, context.book):
                yield from GroupCosting(group, sharding).outlines()


def group_strategies(group: GroupContext, outlines: Iterable[Outline]) -> tuple[ShardingStrategy, ...]:
    """Strategies of a group, the replicated one first, then by seconds, without dominated ones."""
    found = [GroupCosting(group, outline.sharding).strategy(outline) for outline in outlines]
    kept = [c for i, c in enumerate(found) if i == 0 or not any(dominates(o, c, j < i) for j, o in enumerate(found))]
    return (kept[0], *sorted(kept[1:], key=lambda c: c.seconds)[: MAX_STRATEGIES - 1])


def dominates(other: ShardingStrategy, choice: ShardingStrategy, earlier: bool) -> bool:
    """Whether another strategy has the same layouts and is no worse in any objective.

    Of two equal strategies, the earlier one dominates.
    """
    if other is choice or (other.input_layouts, other.output_layouts, other.weight_layouts) != (
        choice.input_layouts,
        choice.output_layouts,
        choice.weight_layouts,
    ):
        return False
    ours, theirs = objectives(choice), objectives(other)
    return all(b <= a for a, b in zip(ours, theirs)) and (ours != theirs or earlier)


def objectives(choice: ShardingStrategy) -> tuple[float, ...]:
    """Costs by which strategies are compared; smaller is better."""
    return choice.seconds, choice.step_seconds, choice.saved_bytes, choice.weight_bytes


# -- equivalent groups -----------------------------------------------------------------------------------------------


def without_names(choices: tuple[ShardingStrategy, ...], members: OpGroup) -> tuple[ShardingStrategy, ...]:
    """The strategies with an operation's index in place of its name."""
    place = {op.name: str(i) for i, op in enumerate(members.ops)}
    return tuple(replace(c, labels=tuple((place[name], label) for name, label in c.labels)) for c in choices)


def rename(choices: tuple[ShardingStrategy, ...], source: OpGroup, target: OpGroup) -> Iterator[ShardingStrategy]:
    """The strategies of one group with the names of another group of its kind."""
    if source is target:
        yield from choices
        return
    names = {old.name: new.name for old, new in zip(source.ops, target.ops, strict=True)}
    for choice in choices:
        yield replace(choice, labels=tuple((names[name], label) for name, label in choice.labels))
