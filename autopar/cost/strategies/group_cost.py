"""What a rank spends on one way of running a group: seconds and bytes of its parts, and conversions inside the group.

Error: against `price` of the graph that `shard_graph` makes of the same choices, on ViT, Swin, ConvNeXt, ResNet-18 and
Mixer with 2 and 4 ranks (tests/test_choices.py). Seconds of assignments that no change of one kind improves agree to
0.1 %; those of arbitrary ones to 6 %, because a sum that is wanted in several layouts is reduced once for each in the
graph and once, then gathered, here. Weights and what they cost once a step agree exactly. Saved bytes agree to 3 %, and
for arbitrary assignments to 7 %: a tensor that several groups save counts for the first of them, in the layout in
which it saves that; copies in other layouts count where that group makes the tensor or comes before the one that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.groups.grouping import OpGroup
from autopar.cost.groups.weight_memory import Sharing, sharded_weight_cost
from autopar.cost.ops.collective_cost import step_seconds, total
from autopar.cost.ops.op_cost import UNMEASURED, OpCost, Pricing, part_cost
from autopar.cost.ops.overlap import exposed_seconds, products_of
from autopar.cost.strategies.propagate import GroupBoundary, GroupSharding, PropagationContext
from autopar.ir.cost_graph import ResidentTensor
from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, TP, Layout
from autopar.ir.strategies import ReshardingCost, ShardingStrategy
from autopar.sharding.fuse_linear import after_layer, is_layer
from autopar.sharding.reshard import ReshardStep, reshard_steps


@dataclass(frozen=True)
class Owners:
    """Which group pays for what several groups hold.

    Args:
        weight: number of the first group that reads a weight.
        saved: number of the first group that saves a storage.
        shared: weights that several groups read.
    """

    weight: Mapping[str, int]
    saved: Mapping[str, int]
    shared: frozenset[str]

    def signature(self, number: int, members: OpGroup, pricing: Pricing) -> tuple:
        """Equal for groups that pay for the same of their weights and storages."""
        saved = [root for op in members.ops for root, _ in saved_by(op, pricing)]
        place = {root: i for i, root in enumerate(dict.fromkeys(saved))}
        weights = [name for op in members.ops for name in op.reads if name in self.weight]
        return (
            tuple((place[root], self.saved[root] == number) for root in saved),
            tuple((self.weight[name] == number, name in self.shared) for name in weights),
        )


def owners(groups: Sequence[OpGroup], pricing: Pricing) -> Owners:
    """The first reader of each weight and the first saver of each storage."""
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
    for name in pricing.facts.ops[op.name].saved_names(op):
        root = pricing.root.get(name, name)
        if root not in pricing.graph.weight:
            yield root, name


@dataclass(frozen=True)
class Costing:
    """One run of one group while its cost is summed up."""

    number: int
    members: OpGroup
    side: GroupBoundary
    run: GroupSharding
    setting: PropagationContext
    pricing: Pricing
    owned: Owners

    @property
    def ranks(self) -> int:
        return self.setting.book.ranks

    def choices(self) -> Iterator[ShardingStrategy]:
        """The run as a choice; as two, if it reads a weight that other groups read too, and may read otherwise."""
        natural = {name: self.run.weight_layout(name, self.setting.book) for name in self.side.weights}
        whole = {name: REPLICATED if name in self.owned.shared else layout for name, layout in natural.items()}
        for stored in (natural,) if whole == natural else (natural, whole):
            yield self.choice(stored)

    def choice(self, stored: Mapping[str, Layout]) -> ShardingStrategy:
        """The choice that keeps the weights so."""
        costs = [self.op_cost(op) for op in self.members.ops]
        inside = total(self.conversions(stored))
        holdings = [self.holding(name, stored[name]) for name in self.side.weights if self.pays_for(name)]
        return ShardingStrategy(
            name=self.name,
            labels=tuple(self.labels()),
            forward_seconds=sum(c.forward_seconds for c in costs) + inside.forward_seconds,
            backward_seconds=sum(c.backward_seconds for c in costs) + inside.backward_seconds,
            step_seconds=sum(h.optimizer_seconds for h in holdings),
            saved_bytes=self.saved_bytes(),
            weight_bytes=sum(h.num_bytes for h in holdings),
            input_layouts=tuple(map(self.run.input_layout, self.side.reads)),
            output_layouts=tuple(self.run.output_layout(name, self.members.anchor) for name in self.side.makes),
            weight_layouts=tuple(stored[name] for name in self.side.weights),
        )

    @property
    def name(self) -> str:
        """The anchor's label, and what its sum is reduced to."""
        chosen = self.run.strategies[self.members.anchor.name]
        if not chosen.label:
            return str(REPLICATED)
        return f"{chosen.label} → {self.run.target}" if any(x.partial for x in chosen.outputs) else chosen.label

    def labels(self) -> Iterator[tuple[str, str]]:
        """The strategy of every operation that is split, and of those that would be if nothing were said of them."""
        for op in self.members.ops:
            label = self.run.strategies[op.name].label
            if label or (self.setting.book.rule(op) is not None and any(map(self.may_be_split, op.reads))):
                yield op.name, label

    def may_be_split(self, name: str) -> bool:
        """Whether a value is made split in the group, or by another group, or held so for another one."""
        return name in self.side.reads or name in self.owned.shared or bool(self.made(name).splits)

    def made(self, name: str) -> Layout:
        """The layout of a value where it is made; inputs are replicated."""
        return self.run.made.get(name, REPLICATED)

    def op_cost(self, op: Op) -> OpCost:
        """Cost of a rank's part of an operation."""
        layouts = self.run.around(op)
        cost = part_cost(op, self.pricing, lambda name: self.local_bytes(name, layouts[name]), self.parts(op))
        return cost.times(self.setting.factors.get(op.name, UNMEASURED))

    def parts(self, op: Op) -> int:
        """How many ranks divide an operation's work."""
        return self.ranks if self.run.strategies[op.name].label else 1

    def local_bytes(self, name: str, layout: Layout) -> float:
        """Size of a rank's part of a value or weight."""
        return self.pricing.num_bytes(name) / (self.ranks if layout.splits else 1)

    def saved_bytes(self) -> int:
        """Bytes that the group pays for: each storage once in every layout."""
        own = 0.0
        parts: dict[tuple[str, bool], float] = {}
        for op in self.members.ops:
            layouts = self.run.around(op)
            own += self.pricing.scaled(self.pricing.facts.ops[op.name].saved_bytes, op.name) / self.parts(op)
            for root, name in saved_by(op, self.pricing):
                if self.owned.saved[root] == self.number:
                    parts[root, bool(layouts[name].splits)] = self.local_bytes(root, layouts[name])
        return round(own + sum(parts.values()))

    def pays_for(self, name: str) -> bool:
        """Whether the group is the first one that reads a weight."""
        return self.owned.weight[name] == self.number

    def holding(self, name: str, layout: Layout) -> ResidentTensor:
        """What keeping a weight costs a rank."""
        sharing = Sharing(self.ranks, storage={name: layout})
        return sharded_weight_cost(self.pricing.graph.weight[name], (self.number,), sharing, self.pricing.hardware)

    def conversions(self, stored: Mapping[str, Layout]) -> Iterator[ReshardingCost]:
        """Those of what the group makes, of weights and inputs, and of what it reads in a second layout."""
        wanted: dict[str, list[Layout]] = {}
        for name, layout in self.run.read:
            wanted.setdefault(name, []).append(layout)
        for name in self.side.makes:
            wanted.setdefault(name, []).append(self.run.output_layout(name, self.members.anchor))
        for name, layouts in wanted.items():
            source = stored.get(name, self.made(name))
            if name in self.side.reads:
                first = self.run.input_layout(name)
                source, layouts = first if first.splits else REPLICATED, layouts[1:]
            yield from self.converted(name, source, layouts)

    def converted(self, name: str, made: Layout, wanted: Sequence[Layout]) -> Iterator[ReshardingCost]:
        """Each step once that leads from one layout into those wanted."""
        taken: dict[Layout, ReshardStep] = {}
        for layout in wanted:
            way = reshard_steps(made, layout, TP, self.ranks)
            for step in way:
                taken.setdefault(layout if step is way[-1] else REPLICATED, step)
        trained, num_bytes = name in self.setting.book.trained, self.pricing.num_bytes(name)
        for step in taken.values():
            seconds = step_seconds(step, num_bytes, trained, self.pricing.hardware, self.ranks)
            yield self.beside_layer(name, step, seconds) if len(taken) == 1 else seconds

    def beside_layer(self, name: str, step: ReshardStep, seconds: ReshardingCost) -> ReshardingCost:
        """What is left of a step that alone reads a value, beside the linear layer that makes it."""
        op = next((op for op in self.members.ops if any(v.name == name for v in op.outputs)), None)
        operator = after_layer(step)
        if operator is None or op is None or not is_layer(op):
            return seconds
        return exposed_seconds(operator, products_of(op, self.op_cost(op), self.pricing.facts), seconds, self.pricing)
