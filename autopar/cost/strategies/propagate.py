"""How the operations of one group follow the strategy of its anchor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost.groups.grouping import OpGroup
from autopar.cost.ops.op_cost import Factors
from autopar.cost.strategies.candidate_splits import CandidateSplits, allowed, depends_on_batch
from autopar.cost.strategies.rule_cache import RuleBook
from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, TP, Layout
from autopar.sharding.propagate import replicated, storage_layout, without_gradient_sum
from autopar.sharding.rule import Strategy, letter_and_parts


class Read(NamedTuple):
    """A value or weight in the layout in which it is read."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class PropagationContext:
    """What following is done by, and how operations compare with their prices."""

    book: RuleBook
    digits: CandidateSplits
    batch_divides: bool
    factors: Factors = field(default_factory=dict)

    def may(self, op: Op, found: Strategy | None) -> bool:
        """Whether an operation may run so, with a label that means the same at another batch size."""
        if found is None or not allowed(found.operands, op, self.book, self.digits.samples, self.batch_divides):
            return False
        names = (*op.reads, *(value.name for value in op.outputs))
        layouts = zip(names, (*found.operands, *found.outputs), strict=True)
        samples, batch = self.digits.samples, self.book.graph.batch
        return not any(at.splits and depends_on_batch(at, samples.get(name), batch) for name, at in layouts)


@dataclass(frozen=True)
class GroupBoundary:
    """What enters and leaves a group: values of other groups, values for other groups, weights."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class GroupSharding:
    """One way to run a group.

    Args:
        target: what a sum that the anchor leaves is reduced to before it is read.
        strategies: of every operation, operands as in ``Op.reads``.
        made: layout of every value that the group makes.
        read: every layout in which something is read, each once.
    """

    target: Layout
    strategies: Mapping[str, Strategy]
    made: Mapping[str, Layout]
    read: tuple[Read, ...]

    def around(self, op: Op) -> Mapping[str, Layout]:
        """The layouts of what an operation reads and makes."""
        found = self.strategies[op.name]
        made = zip((value.name for value in op.outputs), found.outputs, strict=True)
        return dict(zip(op.reads, found.operands, strict=True)) | dict(made)

    def layouts(self, name: str) -> tuple[Layout, ...]:
        """The layouts in which a value or weight is read."""
        return tuple(r.layout for r in self.read if r.name == name)

    def output_layout(self, name: str, anchor: Op) -> Layout:
        """The layout in which a value leaves the group."""
        return reduced_layout(
            self.made[name], self.target if any(v.name == name for v in anchor.outputs) else REPLICATED
        )

    def input_layout(self, name: str) -> Layout:
        """The layout in which a value enters the group; the first, where it is read in several."""
        return self.layouts(name)[0]

    def weight_layout(self, name: str, book: RuleBook) -> Layout:
        """The layout in which a weight is kept for this group's readers."""
        return REPLICATED if book.graph.weight[name].kind == "constant" else storage_layout(set(self.layouts(name)))


def follow(members: OpGroup, chosen: Strategy, target: Layout, setting: PropagationContext) -> GroupSharding:
    """The group with its anchor under a strategy.

    Operations that depend on weights and constants alone make what their reader wants where their rule can. Any other
    goes with its first split operand, or is replicated; values of other groups are read as the strategy wants them. A
    sum is reduced before it is read: the anchor's to ``target``, any other to a replicated tensor.
    """
    free = free_ops(members, setting.book)
    strategies: dict[str, Strategy] = {}
    made: dict[str, Layout] = {}

    def run(op: Op, found: Strategy) -> None:
        strategies[op.name] = in_gradients(op, found, setting.book)
        made.update((value.name, layout) for value, layout in zip(op.outputs, found.outputs, strict=True))

    for op in members.ops:
        if op is members.anchor:
            run(op, chosen)
        elif op.name not in free:
            sums = {v.name for v in members.anchor.outputs}
            known = {n: reduced_layout(made[n], target if n in sums else REPLICATED) for n in op.reads if n in made}
            run(op, following(op, known, setting))
    for op in reversed(members.ops):
        if op.name in free and op.name not in strategies:
            run(op, wanted_by(members.ops, op, strategies, setting))
    reads = (Read(n, at) for op in members.ops for n, at in zip(op.reads, strategies[op.name].operands, strict=True))
    return GroupSharding(target, strategies, made, tuple(dict.fromkeys(reads)))


def reduced_layout(layout: Layout, target: Layout) -> Layout:
    """The layout in which a value is read where it is made: a sum becomes its target."""
    return target if layout.partial else layout


def free_ops(members: OpGroup, book: RuleBook) -> frozenset[str]:
    """Names of the operations, but the anchor, that read neither another group's values nor what the anchor makes."""
    free: set[str] = set()
    for op in members.ops:
        sources = (book.graph.producer.get(name) for name in op.reads)
        if op is not members.anchor and all(s is None or s.name in free for s in sources):
            free.add(op.name)
    return frozenset(free)


def following(op: Op, known: Mapping[str, Layout], setting: PropagationContext) -> Strategy:
    """The strategy that reads the first split operand as it is."""
    for number, name in enumerate(op.reads):
        if known.get(name, REPLICATED).splits:
            found = setting.book.reading(op, number, known[name])
            return found if found is not None and setting.may(op, found) else replicated(op)
    return replicated(op)


def wanted_by(ops: Sequence[Op], op: Op, strategies: Mapping[str, Strategy], setting: PropagationContext) -> Strategy:
    """The strategy that makes an output as its first reader in the group wants it."""
    for number, value in enumerate(op.outputs):
        for reader in ops:
            if value.name in reader.reads and reader.name in strategies:
                layout = strategies[reader.name].operands[reader.reads.index(value.name)]
                found = setting.book.making(op, number, layout) if layout.splits else None
                return found if found is not None and setting.may(op, found) else replicated(op)
    return replicated(op)


def in_gradients(op: Op, found: Strategy, book: RuleBook) -> Strategy:
    """The strategy with nothing partial in a gradient that does not exist."""
    pairs = zip(op.reads, found.operands, strict=True)
    operands = tuple(without_gradient_sum(layout, name in book.trained) for name, layout in pairs)
    return Strategy(found.label, operands, found.outputs)


def keeps_state(members: OpGroup, run: GroupSharding, book: RuleBook) -> bool:
    """Whether weights that are updated in place are read as they are stored."""
    return all(
        run.layouts(name) == (run.weight_layout(name, book),)
        for op in members.ops
        for name in op.mutates
        if name in book.graph.weight and name in op.reads
    )


def candidates(members: OpGroup, setting: PropagationContext) -> Iterable[Strategy]:
    """The strategies of the anchor that are worth trying, the replicated one first.

    A letter is split contiguously unless readers can use it otherwise only.
    """
    op, book = members.anchor, setting.book
    yield replicated(op)
    found: dict[str, Strategy] = {s.label: s for s in book.all(op)} if book.facts.ops[op.name].forward_flops else {}
    for number, value in enumerate(op.outputs):
        for layout in readable(value.name, setting):
            made = book.making(op, number, layout)
            if made is not None:
                found.setdefault(made.label, made)
    for number, name in enumerate(op.reads):
        for layout in (*setting.digits.producible.get(name, ()), *samples_of(name, setting)):
            read = book.reading(op, number, layout)
            if read is not None:
                found.setdefault(read.label, read)
    useful = {letter_and_parts(label)[0] for label, s in found.items() if usable(op, s, setting)}
    for label, strategy in found.items():
        needed = usable(op, strategy, setting) or letter_and_parts(label)[0] not in useful
        if needed and setting.may(op, strategy):
            yield strategy


def samples_of(name: str, setting: PropagationContext) -> tuple[Layout, ...]:
    """The split of a value's samples, where they can be split."""
    found = setting.digits.samples.get(name) if setting.batch_divides else None
    return () if found is None else (found,)


def usable(op: Op, strategy: Strategy, setting: PropagationContext) -> bool:
    """Whether readers of an operation can use what it makes under a strategy."""
    return any(
        layout.partial or layout in readable(value.name, setting) for value, layout in zip(op.outputs, strategy.outputs)
    )


def readable(name: str, setting: PropagationContext) -> tuple[Layout, ...]:
    """The splits of a value that operations behind it can use."""
    return (*setting.digits.consumable.get(name, ()), *samples_of(name, setting))


def targets(members: OpGroup, chosen: Strategy, setting: PropagationContext) -> tuple[Layout, ...]:
    """What a sum that the anchor leaves can be reduced to; the replicated tensor alone where it leaves none."""
    op, found = members.anchor, {REPLICATED: None}
    for value, layout in zip(op.outputs, chosen.outputs):
        if layout.partial:
            fitting = (x for x in readable(value.name, setting) if x.fits(value.shape, {TP: setting.book.ranks}))
            found |= dict.fromkeys(fitting)
    return tuple(found)
