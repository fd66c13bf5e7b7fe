"""Cost on one rank of one sharding of a group: seconds and bytes of its operations, and resharding inside the group.

Error: compared with `price` of the local graph that `shard_graph` makes of the same strategies, on ViT, Swin,
ConvNeXt, ResNet-18 and Mixer with 2 and 4 ranks (tests/unit/cost/test_strategies.py). Seconds agree to 0.1 % for
shardings that no change of one kind improves. For arbitrary shardings they agree to 6 %: a partial value that is read
in several layouts is reduced once per layout in the graph, but reduced once and then gathered here. Weights and their
seconds per step agree exactly. Saved bytes agree to 3 %, and for arbitrary shardings to 14 %. A tensor that several
groups save counts for the first of them, in its layout. Copies in other layouts count if that group makes the tensor
or precedes the group that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from autopar.cost.groups.grouping import OpGroup
from autopar.cost.groups.weight_memory import Sharing, sharded_weight_cost
from autopar.cost.ops.collective_cost import (
    exchange_cost,
    is_collective,
    reshard_step_cost,
    sum_costs,
    window_copy_cost,
)
from autopar.cost.ops.kernel_shapes import TILE_ROWS, product_slowdown
from autopar.cost.ops.op_cost import OpCost, Pricing, collective_cost, local_op_cost
from autopar.cost.ops.overlap import exposed_seconds, gemm_seconds
from autopar.cost.strategies.propagate import GroupBoundary, GroupSharding, PropagationContext
from autopar.ir.cost_graph import ResidentTensor
from autopar.ir.graph import Op, Value
from autopar.ir.layout import REPLICATED, Layout, pattern_of
from autopar.ir.strategies import ReshardingCost, ShardingStrategy
from autopar.ir.tensor_axes import TensorAxis
from autopar.sharding.exchanges import EXCHANGING, saved_strip_bytes
from autopar.sharding.fuse_linear import after_layer, is_layer
from autopar.sharding.localise import localised
from autopar.sharding.reshard import ReshardStep, reshard_steps
from autopar.sharding.rule import factor_of


@dataclass(frozen=True)
class Owners:
    """The group that is charged for a weight or a storage that several groups use.

    Args:
        weight: number of the first group that reads each weight.
        saved: number of the first group that saves each storage.
        shared: weights that several groups read.
    """

    weight: Mapping[str, int]
    saved: Mapping[str, int]
    shared: frozenset[str]

    def signature(self, number: int, members: OpGroup, pricing: Pricing) -> tuple:
        """A key that is equal for groups that are charged for the same ones of their weights and storages."""
        saved = [root for op in members.ops for root, _ in saved_by(op, pricing)]
        place = {root: i for i, root in enumerate(dict.fromkeys(saved))}
        weights = [name for op in members.ops for name in op.reads if name in self.weight]
        return (
            tuple((place[root], self.saved[root] == number) for root in saved),
            tuple((self.weight[name] == number, name in self.shared) for name in weights),
        )


def owners(groups: Sequence[OpGroup], pricing: Pricing) -> Owners:
    """Owners of all weights and storages: the first group that reads, or saves, each."""
    weight: dict[str, int] = {}
    saved: dict[str, int] = {}
    shared: set[str] = set()
    for number, members in enumerate(groups):
        for op in members.ops:
            for name in op.reads:
                if name in pricing.graph.weight and weight.setdefault(name, number) != number:
                    shared.add(name)
            for root, _ in saved_by(op, pricing):
                saved.setdefault(root, number)
    return Owners(weight, saved, frozenset(shared))


def saved_by(op: Op, pricing: Pricing) -> Iterator[tuple[str, str]]:
    """(storage, tensor) of each activation that an operation saves for its backward."""
    for name in pricing.stats.ops[op.name].saved_names(op):
        root = pricing.storage.get(name, name)
        if root not in pricing.graph.weight:
            yield root, name


@dataclass(frozen=True)
class GroupContext:
    """One group, and what its strategies are found from and priced by.

    Args:
        number: the group's number.
        boundary: values and weights that enter and leave the group.
        context: rules and candidate splits of the graph.
        pricing: of the unsharded graph.
        least: as ``pricing``, with the traffic that no strategy of another group saves.
        owners: groups that are charged for shared weights and storages.
        known: costs of parts of operations, by number, layouts and whether they are split, which all groups share.
    """

    number: int
    members: OpGroup
    boundary: GroupBoundary
    context: PropagationContext
    pricing: Pricing
    least: Pricing
    owners: Owners
    known: dict[tuple, OpCost] = field(default_factory=dict)

    def signature(self) -> tuple:
        """A key that is equal for groups with the same strategies: names are replaced by where the values come from."""
        members, boundary, book, owners = self.members, self.boundary, self.context.book, self.owners
        place = {v.name: (i, j) for i, op in enumerate(members.ops) for j, v in enumerate(op.outputs)}
        place |= {name: ("read", i) for i, name in enumerate(boundary.reads)}
        place |= {name: ("weight", i, name in owners.shared) for i, name in enumerate(boundary.weights)}
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
        names = [*boundary.reads, *boundary.weights, *(v.name for op in members.ops for v in op.outputs)]
        return (
            pattern_of(members.anchor.name),
            ops,
            tuple(place[name] for name in boundary.makes),
            tuple(self.context.splits.of_value(name) for name in names),
            owners.signature(self.number, members, self.pricing),
            tuple(book.graph.weight[name].kind for name in boundary.weights),
        )


@dataclass(frozen=True)
class Outline:
    """A strategy of a group without what depends on the batch size: seconds and saved bytes are 0.

    ``stored`` are the layouts in which the weights are stored.
    """

    sharding: GroupSharding
    stored: Mapping[str, Layout]
    strategy: ShardingStrategy


@dataclass(frozen=True)
class GroupCosting:
    """The cost of one sharding of one group."""

    group: GroupContext
    sharding: GroupSharding

    @property
    def axis(self) -> TensorAxis:
        return self.group.context.book.axis

    @property
    def ranks(self) -> int:
        return self.axis.ranks

    def outlines(self) -> Iterator[Outline]:
        """The sharding as a strategy; as two, if it splits a weight that other groups read too.

        The second one stores such weights replicated, so that groups can agree on a layout.
        """
        split = {
            name: self.sharding.weight_layout(name, self.group.context.book) for name in self.group.boundary.weights
        }
        replicated = {
            name: REPLICATED if name in self.group.owners.shared else layout for name, layout in split.items()
        }
        for stored in (split,) if replicated == split else (split, replicated):
            yield self.outline(stored)

    def outline(self, stored: Mapping[str, Layout]) -> Outline:
        """The strategy that stores the weights in these layouts."""
        weight_costs = [
            self.weight_cost(name, stored[name]) for name in self.group.boundary.weights if self.pays_for(name)
        ]
        strategy = ShardingStrategy(
            name=self.name,
            labels=tuple(self.labels()),
            forward_seconds=0.0,
            backward_seconds=0.0,
            step_seconds=sum(h.optimizer_seconds for h in weight_costs),
            saved_bytes=0,
            weight_bytes=sum(h.num_bytes for h in weight_costs),
            input_layouts=tuple(map(self.sharding.input_layout, self.group.boundary.reads)),
            output_layouts=tuple(
                self.sharding.output_layout(name, self.group.members.anchor) for name in self.group.boundary.makes
            ),
            weight_layouts=tuple(stored[name] for name in self.group.boundary.weights),
        )
        return Outline(self.sharding, stored, strategy)

    def strategy(self, outline: Outline) -> ShardingStrategy:
        """The priced strategy."""
        costs = [self.op_cost(op) for op in self.group.members.ops]
        inside = sum_costs(self.reshardings(outline.stored))
        return replace(
            outline.strategy,
            forward_seconds=sum(c.forward_seconds for c in costs) + inside.forward_seconds,
            backward_seconds=sum(c.backward_seconds for c in costs) + inside.backward_seconds,
            saved_bytes=self.saved_bytes(),
            context_seconds=sum(map(self.context_seconds, self.group.members.ops, costs)),
        )

    @property
    def name(self) -> str:
        """The anchor's label, and the layout to which its partial output is reduced."""
        chosen = self.sharding.strategies[self.group.members.anchor.name]
        if not chosen.label:
            return str(REPLICATED)
        return f"{chosen.label} → {self.sharding.target}" if any(x.partial for x in chosen.outputs) else chosen.label

    def labels(self) -> Iterator[tuple[str, str]]:
        """(operation, label) of split operations, and of operations that would be split if they had no label."""
        for op in self.group.members.ops:
            label = self.sharding.strategies[op.name].label
            if label or (self.group.context.book.rule(op) is not None and any(map(self.may_be_split, op.reads))):
                yield op.name, label

    def may_be_split(self, name: str) -> bool:
        """Whether a value may be split: made so in the group, read from another group, or a shared weight."""
        return name in self.group.boundary.reads or name in self.group.owners.shared or bool(self.made(name).splits)

    def made(self, name: str) -> Layout:
        """The layout in which a value is made; graph inputs are replicated."""
        return self.sharding.made.get(name, REPLICATED)

    def op_cost(self, op: Op) -> OpCost:
        """Cost of a rank's part of an operation, scaled by its measured factor."""
        cost, factor = self.part_cost(op), self.group.context.factors.get(op.name)
        return cost if factor is None else cost.scaled_by(factor)

    def part_cost(self, op: Op, least: bool = False) -> OpCost:
        """Analytic cost of a rank's part of an operation, under the pricing or the least one."""
        pricing, layouts = self.group.least if least else self.group.pricing, self.sharding.around(op)
        names = (*op.reads, *(v.name for v in op.outputs))
        split = bool(self.sharding.strategies[op.name].label)
        key = (least, pricing.op_numbers[op.name], split, *map(layouts.__getitem__, names))
        if key not in self.group.known:
            num_bytes = partial(self.local_bytes, layouts)
            if is_collective(op):
                cost = collective_cost(op, pricing, num_bytes)
            else:
                cost = local_op_cost(op, pricing, num_bytes, self.parts(op))
                local, part = self.local(op) if split else (op, None)
                if local.target in EXCHANGING:
                    part = part or self.group.context.book.graph.readable[op.reads[0]]
                    scale, axis = pricing.batch / pricing.graph.batch, pricing.axis_of(local)
                    collectives = exchange_cost(local, part, scale, pricing.hardware, axis)
                    cost = cost.exchanging(collectives, window_copy_cost(local, part, scale, pricing.hardware))
            self.group.known[key] = cost
        return self.group.known[key]

    def strip_bytes(self, op: Op) -> int:
        """Bytes that the first rank's part of an operation saves next to its borders."""
        rule = self.group.context.book.rule(op)
        has_halo = rule is not None and factor_of(self.sharding.strategies[op.name].label).letter in rule.halos
        return saved_strip_bytes(*self.local(op)) if has_halo else 0

    def local(self, op: Op) -> tuple[Op, Value]:
        """The first rank's part of a split operation, and of its first operand."""
        book, chosen = self.group.context.book, self.sharding.strategies[op.name]
        rule, whole = book.rule(op), book.graph.readable[op.reads[0]]
        assert rule is not None, f"{op.name} is split without a rule"
        part = replace(whole, shape=chosen.operands[0].local_shape(whole.shape, {self.axis.name: self.ranks}))
        return localised(op, rule, chosen, self.ranks), part

    def context_seconds(self, op: Op, cost: OpCost) -> float:
        """Part of an operation's seconds that is not sure under this strategy of its group.

        Parts of a ragged split, and of fewer rows than a tile, may be aligned better than the whole product.
        """
        least, slowdown = self.part_cost(op, least=True), 1.0
        if self.sharding.strategies[op.name].label and op.outputs:
            rows = prod(op.outputs[0].shape[:-1]) / self.ranks
            if rows < TILE_ROWS or self.parts(op) != self.ranks:
                slowdown = product_slowdown(op, self.group.pricing.graph)
        sure = (least.forward_seconds + least.backward_seconds) / slowdown
        return cost.forward_seconds + cost.backward_seconds - sure

    def parts(self, op: Op) -> float:
        """Number of ranks that divide an operation's FLOPs; fewer if ragged, since the largest part counts."""
        if not self.sharding.strategies[op.name].label:
            return 1
        return next((self.divisor(n, at) for n, at in self.sharding.around(op).items() if at.ragged), self.ranks)

    def divisor(self, name: str, layout: Layout) -> float:
        """Size of a whole value or weight over that of its largest part."""
        if layout.ragged:
            return 1 / layout.largest_share(self.group.context.book.graph.shapes[name], {self.axis.name: self.ranks})
        return self.ranks if layout.splits else 1

    def local_bytes(self, layouts: Mapping[str, Layout], name: str) -> float:
        """Size of the largest part of a value or weight in its layout, byte."""
        return self.group.pricing.num_bytes(name) / self.divisor(name, layouts[name])

    def saved_bytes(self) -> int:
        """Saved bytes that the group is charged for: each storage once, split and unsplit copies counted separately."""
        own = 0.0
        parts: dict[tuple[str, bool], float] = {}
        for op in self.group.members.ops:
            layouts = self.sharding.around(op)
            whole = self.group.pricing.stats.ops[op.name].saved_bytes / self.parts(op)
            own += self.group.pricing.scaled(whole + self.strip_bytes(op), op.name)
            for root, name in saved_by(op, self.group.pricing):
                if self.group.owners.saved[root] == self.group.number:
                    whole_bytes, divisor = self.group.pricing.num_bytes(root), self.divisor(name, layouts[name])
                    parts[root, bool(layouts[name].splits)] = whole_bytes / divisor
        return round(own + sum(parts.values()))

    def pays_for(self, name: str) -> bool:
        """Whether the group is charged for a weight: it is the first to read it."""
        return self.group.owners.weight[name] == self.group.number

    def weight_cost(self, name: str, layout: Layout) -> ResidentTensor:
        """Cost of a weight on one rank in this layout."""
        sharing = Sharing(self.ranks, storage={name: layout}, axes=(self.axis,))
        return sharded_weight_cost(
            self.group.pricing.graph.weight[name], (self.group.number,), sharing, self.group.pricing.hardware
        )

    def reshardings(self, stored: Mapping[str, Layout]) -> Iterator[ReshardingCost]:
        """Resharding inside the group: of its values and weights, and of values that it reads in a second layout."""
        layouts_of: dict[str, list[Layout]] = {}
        for name, layout in self.sharding.read:
            layouts_of.setdefault(name, []).append(layout)
        for name in self.group.boundary.makes:
            layouts_of.setdefault(name, []).append(self.sharding.output_layout(name, self.group.members.anchor))
        for name, layouts in layouts_of.items():
            source = stored.get(name, self.made(name))
            if name in self.group.boundary.reads:
                first = self.sharding.input_layout(name)
                source, layouts = first if first.splits else REPLICATED, layouts[1:]
            yield from self.reshard_once(name, source, layouts)

    def reshard_once(self, name: str, made: Layout, wanted: Sequence[Layout]) -> Iterator[ReshardingCost]:
        """Cost of each resharding step from one layout into several; steps that these have in common count once."""
        steps_by_layout: dict[Layout, ReshardStep] = {}
        for layout in wanted:
            path = reshard_steps(made, layout, self.axis.name, self.ranks)
            for step in path:
                steps_by_layout.setdefault(layout if step is path[-1] else REPLICATED, step)
        trained, num_bytes = name in self.group.context.book.trained, self.group.pricing.num_bytes(name)
        for step in steps_by_layout.values():
            seconds = reshard_step_cost(step, num_bytes, trained, self.group.pricing.hardware, self.axis)
            yield self.exposed_after_layer(name, step, seconds) if len(steps_by_layout) == 1 else seconds

    def exposed_after_layer(self, name: str, step: ReshardStep, seconds: ReshardingCost) -> ReshardingCost:
        """Exposed seconds of a step that is the only reader of a value: it overlaps with the layer that makes it."""
        op = next((op for op in self.group.members.ops if any(v.name == name for v in op.outputs)), None)
        operator = after_layer(step)
        if operator is None or op is None or not is_layer(op):
            return seconds
        return exposed_seconds(
            operator, gemm_seconds(op, self.op_cost(op), self.group.pricing.stats), seconds, self.ranks,
            self.group.pricing.hardware,
        )  # fmt: skip
