"""From a whole graph to the ways in which each of its groups can be sharded, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.groups.cost_graph import LOSS
from autopar.cost.groups.grouping import OpGroup, group_ops
from autopar.cost.groups.weight_memory import Sharing, sharded_weight_cost
from autopar.cost.ops.collective_cost import step_seconds, total
from autopar.cost.ops.op_cost import NO_FACTORS, UNMEASURED, Factors, Pricing, op_costs, part_cost
from autopar.cost.ops.op_stats import Facts
from autopar.cost.ops.overlap import exposed_seconds, products_of
from autopar.cost.strategies.candidate_splits import digits
from autopar.cost.strategies.group_cost import Costing, Owners, owners, saved_by
from autopar.cost.strategies.propagate import (
    GroupBoundary,
    PropagationContext,
    candidates,
    follow,
    keeps_state,
    targets,
)
from autopar.cost.strategies.rule_cache import RuleBook
from autopar.ir.graph import Graph, refs
from autopar.ir.hardware import Hardware
from autopar.ir.layout import REPLICATED, TP, Layout, pattern_of
from autopar.ir.strategies import ReshardingCost, ShardingStrategy, StrategyGraph, StrategyGroup
from autopar.sharding.fuse_linear import before_layer, is_layer
from autopar.sharding.reshard import reshard_steps

MAX_STRATEGIES = 8


@dataclass(frozen=True)
class Kind:
    """Groups that are the same but for names: the choices of one of them, and the number that they share."""

    number: int
    members: OpGroup
    choices: tuple[ShardingStrategy, ...]


def choice_graph(
    graph: Graph, facts: Facts, hardware: Hardware, batch: int, ranks: int, factors: Factors = NO_FACTORS
) -> StrategyGraph:
    """The choices of every group of a whole training graph on the ranks of a tensor-parallel axis.

    The groups are those of `price`. A choice is a strategy of the group's anchor, which the other operations follow,
    and, where a sum comes out, the layout that it is reduced to. Groups whose anchors stand at the same place of a
    repeated block, and whose operations, shapes and surroundings are equal, are of one kind.

    Args:
        facts: of this graph, from `op_facts`.
        batch: samples per microbatch, of all ranks of the axis together.
        ranks: at least 2.
        factors: as in `price`; of groups that are alike but for their names, those of the first.
    Raises:
        HardwareError: the machine has no peak for a dtype the model computes in.
    Error: against `price` of the graph that `shard_graph` makes of a choice: see `autopar.cost.strategies.group_cost`.
    """
    pricing = Pricing(graph, facts, hardware, batch, ranks)
    costs = op_costs(pricing)
    seconds = {name: cost.forward_seconds + cost.backward_seconds for name, cost in costs.items()}
    groups = group_ops(graph, seconds, {name: cost.flops for name, cost in costs.items()})
    divides = batch % ranks == 0 and graph.batch % ranks == 0
    book = RuleBook(graph, facts, ranks)
    setting = PropagationContext(book, digits(book, divides), divides, factors)
    owned = owners(groups, pricing)
    sides = interfaces(groups, graph)
    kinds: dict[tuple, Kind] = {}
    numbers: dict[tuple, int] = {}
    listed: list[StrategyGroup] = []
    for number, (members, side) in enumerate(zip(groups, sides)):
        key = signature(number, members, side, setting, pricing, owned)
        if key not in kinds:
            found = choices_of(number, members, side, setting, pricing, owned)
            alike = (*key[:3], without_names(found, members))
            kinds[key] = Kind(numbers.setdefault(alike, len(numbers)), members, found)
        kind = kinds[key]
        renamed = tuple(rename(kind.choices, kind.members, members))
        listed.append(StrategyGroup(members.anchor.name, kind.number, side.reads, side.makes, side.weights, renamed))
    listed.append(loss_group(graph, len(numbers)))
    made = {name: round(pricing.num_bytes(name)) for side in sides for name in side.makes}
    return StrategyGraph(tuple(listed), made, conversions(listed, groups, owned, pricing, setting))


def with_replicas(choices: StrategyGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> StrategyGraph:
    """The same choices with weights as `price` takes them for these replicas: ``step_seconds`` with the reduction of
    their gradients, and ``weight_bytes``.

    Args:
        graph: the whole graph that the choices are of.
        sharing: its storage is not asked for, as each choice has its own.
    """
    if sharing.dp == 1:
        return choices
    paid: set[str] = set()

    def shared(group: StrategyGroup, choice: ShardingStrategy) -> ShardingStrategy:
        stored = {name: layout for name, layout in zip(group.weights, choice.weight_layouts) if name not in paid}
        here = replace(sharing, storage=stored)
        holdings = [sharded_weight_cost(graph.weight[name], (0,), here, hardware) for name in stored]
        seconds = sum(h.optimizer_seconds + h.reduce_seconds for h in holdings)
        return replace(choice, step_seconds=seconds, weight_bytes=sum(h.num_bytes for h in holdings))

    groups = []
    for group in choices.groups:
        groups.append(replace(group, strategies=tuple(shared(group, choice) for choice in group.strategies)))
        paid.update(group.weights)
    return replace(choices, groups=tuple(groups))


def interfaces(groups: Sequence[OpGroup], graph: Graph) -> tuple[GroupBoundary, ...]:
    """What each group reads and makes for others, in order of execution."""
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
    """The loss, which reads the model's outputs whole."""
    names = tuple(dict.fromkeys(refs(graph.outputs)))
    reads = tuple(n for n in names if n in graph.producer)
    weights = tuple(n for n in names if n in graph.weight)
    only = ShardingStrategy(
        "replicated", (), 0.0, 0.0, 0.0, 0, 0, (REPLICATED,) * len(reads), (), (REPLICATED,) * len(weights)
    )
    return StrategyGroup(LOSS, kind, reads, (), weights, (only,))


def conversions(
    groups: Sequence[StrategyGroup],
    members: Sequence[OpGroup],
    owned: Owners,
    pricing: Pricing,
    setting: PropagationContext,
) -> Mapping[tuple[str, Layout, Layout], ReshardingCost]:
    """Every conversion between two layouts that can occur.

    Error: a copy counts as saved if some reader that saves may read in its layout, whether or not that one does.
    """
    book, layers = setting.book, dict(lone_layers(pricing, setting.factors))
    kept = saved_copies(groups, members, owned, pricing)
    gives: dict[str, set[Layout]] = {}
    known: dict[tuple, ReshardingCost] = {}
    found: dict[tuple[str, Layout, Layout], ReshardingCost] = {}
    for group in groups:
        for i, name in enumerate(group.reads):
            num_bytes, trained, layer = pricing.num_bytes(name), name in book.trained, layers.get(name)
            for read in dict.fromkeys(choice.input_layouts[i] for choice in group.strategies):
                for made in gives[name]:
                    if made == read:
                        continue
                    copied = (name, read) in kept and bool(made.splits or read.splits)
                    saved = round(num_bytes / (pricing.ranks if read.splits else 1)) if copied else 0
                    key = (made, read, num_bytes, trained, layer, saved)
                    if key not in known:
                        seconds = conversion(made, read, num_bytes, trained, layer, pricing)
                        known[key] = replace(seconds, saved_bytes=saved)
                    found[name, made, read] = known[key]
        for i, name in enumerate(group.makes):
            gives[name] = {choice.output_layouts[i] for choice in group.strategies}
    return found


def saved_copies(
    groups: Sequence[StrategyGroup], members: Sequence[OpGroup], owned: Owners, pricing: Pricing
) -> frozenset[tuple[str, Layout]]:
    """Values that the group that makes them saves, or an earlier one, and the layouts in which readers may save them
    again."""
    maker = {name: number for number, group in enumerate(groups) for name in group.makes}
    found: set[tuple[str, Layout]] = set()
    for group, own in zip(groups, members):  # the loss behind them saves nothing
        roots = {root for op in own.ops for root, _ in saved_by(op, pricing)}
        for i, name in enumerate(group.reads):
            root = pricing.root.get(name, name)
            if root in roots and owned.saved[root] <= maker[name]:
                found.update((name, choice.input_layouts[i]) for choice in group.strategies)
    return frozenset(found)


def conversion(
    made: Layout, read: Layout, num_bytes: float, trained: bool, layer: ReshardingCost | None, pricing: Pricing
) -> ReshardingCost:
    """Time to bring a tensor from one layout into another and its gradient back.

    Args:
        num_bytes: of the whole tensor.
        trained: whether a gradient comes back.
        layer: the products of a linear layer that alone reads it, if one does.
    """
    *first, last = reshard_steps(made, read, TP, pricing.ranks)
    parts = [step_seconds(step, num_bytes, trained, pricing.hardware, pricing.ranks) for step in (*first, last)]
    operator = before_layer(last, trained)
    if operator is not None and layer is not None:
        parts[-1] = exposed_seconds(operator, layer, parts[-1], pricing)
    return total(parts)


def lone_layers(pricing: Pricing, factors: Factors) -> Iterator[tuple[str, ReshardingCost]]:
    """Values that a linear layer alone reads, and its products if it is split by its outputs, as in those of
    `autopar.sharding.fuse_linear`."""
    graph = pricing.graph
    readers = Counter([*(name for op in graph.ops for name in op.reads), *refs(graph.outputs)])
    for op in graph.ops:
        if is_layer(op) and readers[op.reads[0]] == 1:
            whole = op.reads[0]

            def num_bytes(name: str, whole: str = whole) -> float:
                return pricing.num_bytes(name) / (1 if name == whole else pricing.ranks)

            cost = part_cost(op, pricing, num_bytes, pricing.ranks).times(factors.get(op.name, UNMEASURED))
            yield whole, products_of(op, cost, pricing.facts)


# -- choices of one group ------------------------------------------------------------------------------------------


def choices_of(
    number: int, members: OpGroup, side: GroupBoundary, setting: PropagationContext, pricing: Pricing, owned: Owners
) -> tuple[ShardingStrategy, ...]:
    """The choices of a group, the replicated one first; those that another one is better than in every way are gone."""
    found: list[ShardingStrategy] = []
    for strategy in candidates(members, setting):
        for target in targets(members, strategy, setting):
            run = follow(members, strategy, target, setting)
            if keeps_state(members, run, setting.book):
                found.extend(Costing(number, members, side, run, setting, pricing, owned).choices())
    kept = [c for i, c in enumerate(found) if i == 0 or not any(better(o, c, j < i) for j, o in enumerate(found))]
    return (kept[0], *sorted(kept[1:], key=lambda c: c.seconds)[: MAX_STRATEGIES - 1])


def better(other: ShardingStrategy, choice: ShardingStrategy, earlier: bool) -> bool:
    """Whether another choice fits the same surroundings and is at least as good in every way."""
    if other is choice or (other.input_layouts, other.output_layouts, other.weight_layouts) != (
        choice.input_layouts,
        choice.output_layouts,
        choice.weight_layouts,
    ):
        return False
    ours, theirs = sizes(choice), sizes(other)
    return all(b <= a for a, b in zip(ours, theirs)) and (ours != theirs or earlier)


def sizes(choice: ShardingStrategy) -> tuple[float, ...]:
    """What is better small."""
    return choice.seconds, choice.step_seconds, choice.saved_bytes, choice.weight_bytes


# -- kinds -----------------------------------------------------------------------------------------------------------


def signature(
    number: int, members: OpGroup, side: GroupBoundary, setting: PropagationContext, pricing: Pricing, owned: Owners
) -> tuple:
    """Equal for groups that have the same choices: names are replaced by where they come from."""
    book, known = setting.book, setting.digits.known
    place = {v.name: (i, j) for i, op in enumerate(members.ops) for j, v in enumerate(op.outputs)}
    place |= {name: ("read", i) for i, name in enumerate(side.reads)}
    place |= {name: ("weight", i, name in owned.shared) for i, name in enumerate(side.weights)}
    ops = tuple(
        (
            book.key(op),
            op is members.anchor,
            op.name in book.batch_dependent,
            op.name in book.always_replicated,
            tuple(place.get(name, ("input",)) for name in op.reads),
            tuple(place.get(name, ("input",)) for name in op.mutates),
        )
        for op in members.ops
    )
    names = [*side.reads, *side.weights, *(v.name for op in members.ops for v in op.outputs)]
    around = tuple(known(name) for name in names)
    return (
        pattern_of(members.anchor.name),
        ops,
        tuple(place[name] for name in side.makes),
        around,
        owned.signature(number, members, pricing),
        tuple(book.graph.weight[name].kind for name in side.weights),
    )


def without_names(choices: tuple[ShardingStrategy, ...], members: OpGroup) -> tuple[ShardingStrategy, ...]:
    """The choices with positions for names."""
    place = {op.name: str(i) for i, op in enumerate(members.ops)}
    return tuple(replace(c, labels=tuple((place[name], label) for name, label in c.labels)) for c in choices)


def rename(choices: tuple[ShardingStrategy, ...], source: OpGroup, target: OpGroup) -> Iterator[ShardingStrategy]:
    """The choices of one group for another one of its kind."""
    if source is target:
        yield from choices
        return
    names = {old.name: new.name for old, new in zip(source.ops, target.ops, strict=True)}
    for choice in choices:
        yield replace(choice, labels=tuple((names[name], label) for name, label in choice.labels))
