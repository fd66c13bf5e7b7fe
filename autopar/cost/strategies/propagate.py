"""Propagation within a group: how its operations are sharded, given the strategy of its anchor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost.groups.grouping import OpGroup
from autopar.cost.ops.op_cost import Factors
from autopar.cost.strategies.candidate_splits import CandidateSplits, depends_on_batch, may_read
from autopar.cost.strategies.rule_cache import RuleCache
from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, Layout
from autopar.sharding.propagate import in_gradients, replicated, storage_layout
from autopar.sharding.rule import Strategy, factor_of


class ReadLayout(NamedTuple):
    """A value or weight, and a layout in which it is read."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class PropagationContext:
    """Context of propagation that all groups share.

    Args:
        book: sharding rules by operation.
        splits: candidate splits.
        batch_divides: whether samples may be split.
        factors: measured factors by operation.
    """

    book: RuleCache
    splits: CandidateSplits
    batch_divides: bool
    factors: Factors = field(default_factory=dict)

    def allows(self, op: Op, found: Strategy | None) -> bool:
        """Whether an operation may run with a strategy, and its label means the same at another batch size."""
        if found is None or not may_read(found.operands, op, self.book, self.splits.samples, self.batch_divides):
            return False
        names = (*op.reads, *(value.name for value in op.outputs))
        layouts = zip(names, (*found.operands, *found.outputs), strict=True)
        samples, batch = self.splits.samples, self.book.graph.batch
        return not any(at.splits and depends_on_batch(at, samples.get(name), batch) for name, at in layouts)


@dataclass(frozen=True)
class GroupBoundary:
    """Names at the boundary of a group: values read from other groups, values made for other groups, weights."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class GroupSharding:
    """One sharding of a group.

    Args:
        target: layout to which a partial output of the anchor is reduced before it is read.
        strategies: strategy of every operation by name, with operands as in ``Op.reads``.
        made: layout in which the group makes each of its values.
        read: every (name, layout) in which the group reads a value or weight, without duplicates.
    """

    target: Layout
    strategies: Mapping[str, Strategy]
    made: Mapping[str, Layout]
    read: tuple[ReadLayout, ...]

    def around(self, op: Op) -> Mapping[str, Layout]:
        """Layouts of an operation's operands and outputs, by name."""
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
        """The layout in which a value enters the group; the first of them, if the group reads it in several."""
        return self.layouts(name)[0]

    def weight_layout(self, name: str, book: RuleCache) -> Layout:
        """The layout in which a weight is stored for its readers in this group."""
        return REPLICATED if book.graph.weight[name].kind == "constant" else storage_layout(set(self.layouts(name)))


def propagate_anchor(
    members: OpGroup, chosen: Strategy, target: Layout, context: PropagationContext, lead: Layout = REPLICATED
) -> GroupSharding:
    """The sharding of a group whose anchor has a strategy.

    An operation that depends only on weights and constants follows its reader's layout if its rule allows. Any other
    operation follows its first split operand, or is replicated. A partial value is reduced before it is read: the
    anchor's output to ``target``, any other to a replicated tensor.

    Args:
        chosen: strategy of the anchor.
        target: layout to which a partial output of the anchor is reduced.
        lead: split layout in which collectives of outer axes that bring the group's inputs read them, where they can.
            Otherwise they follow their reader.
    """
    leading = leading_collectives(members, context.book)
    led = {op.name: found for op in leading if lead.splits and (found := reading_as(op, lead, context)) is not None}
    free = (input_free_ops(members, context.book) | {op.name for op in leading}) - led.keys()
    strategies: dict[str, Strategy] = {}
    made: dict[str, Layout] = {}

    def run(op: Op, found: Strategy) -> None:
        strategies[op.name] = in_gradients(op, found, context.book.trained)
        made.update((value.name, layout) for value, layout in zip(op.outputs, found.outputs, strict=True))

    for op in members.ops:
        if op is members.anchor:
            run(op, chosen)
        elif op.name in led:
            run(op, led[op.name])
        elif op.name not in free:
            sums = {v.name for v in members.anchor.outputs}
            layouts = {n: reduced_layout(made[n], target if n in sums else REPLICATED) for n in op.reads if n in made}
            run(op, follow_operand(op, layouts, context))
    for op in reversed(members.ops):
        if op.name in free and op.name not in strategies:
            run(op, follow_reader(members.ops, op, strategies, context))
    reads = (
        ReadLayout(n, at) for op in members.ops for n, at in zip(op.reads, strategies[op.name].operands, strict=True)
    )
    return GroupSharding(target, strategies, made, tuple(dict.fromkeys(reads)))


def leading_collectives(members: OpGroup, book: RuleCache) -> tuple[Op, ...]:
    """Collectives of outer axes that read values of other groups."""
    made = {value.name for op in members.ops for value in op.outputs}
    return tuple(op for op in members.ops if op.home and op.reads[0] in book.graph.producer and op.reads[0] not in made)


def reading_as(op: Op, layout: Layout, context: PropagationContext) -> Strategy | None:
    """The strategy in which a collective reads its operand in a layout; None if there is none."""
    found = context.book.reading(op, 0, layout)
    return found if found is not None and context.allows(op, found) else None


def lead_layouts(members: OpGroup, context: PropagationContext) -> tuple[Layout, ...]:
    """Layouts in which `leading_collectives` can read values of other groups; replicated, where they follow, first."""
    found: dict[Layout, None] = {REPLICATED: None}
    for op in leading_collectives(members, context.book):
        name = op.reads[0]
        splits = (*context.splits.producible.get(name, ()), *consumable_splits(name, context))
        found |= dict.fromkeys(split for split in splits if reading_as(op, split, context) is not None)
    return tuple(found)


def reduced_layout(layout: Layout, target: Layout) -> Layout:
    """The layout after reduction: ``target`` for a partial value, else its own layout."""
    return target if layout.partial else layout


def input_free_ops(members: OpGroup, book: RuleCache) -> frozenset[str]:
    """Names of the operations that depend on neither the anchor nor another group's values."""
    free: set[str] = set()
    for op in members.ops:
        sources = (book.graph.producer.get(name) for name in op.reads)
        if op is not members.anchor and all(s is None or s.name in free for s in sources):
            free.add(op.name)
    return frozenset(free)


def follow_operand(op: Op, known: Mapping[str, Layout], context: PropagationContext) -> Strategy:
    """The strategy that reads the first split operand in its layout; replicated if there is none."""
    for number, name in enumerate(op.reads):
        if known.get(name, REPLICATED).splits:
            found = context.book.reading(op, number, known[name])
            return found if found is not None and context.allows(op, found) else replicated(op)
    return replicated(op)


def follow_reader(
    ops: Sequence[Op], op: Op, strategies: Mapping[str, Strategy], context: PropagationContext
) -> Strategy:
    """The strategy that makes an output in the layout of its first reader in the group; replicated if there is none."""
    for number, value in enumerate(op.outputs):
        for reader in ops:
            if value.name in reader.reads and reader.name in strategies:
                layout = strategies[reader.name].operands[reader.reads.index(value.name)]
                found = context.book.making(op, number, layout) if layout.splits else None
                return found if found is not None and context.allows(op, found) else replicated(op)
    return replicated(op)


def keeps_state(members: OpGroup, sharding: GroupSharding, book: RuleCache) -> bool:
    """Whether weights that are updated in place are read in the layout in which they are stored."""
    return all(
        sharding.layouts(name) == (sharding.weight_layout(name, book),)
        for op in members.ops
        for name in op.mutates
        if name in book.graph.weight and name in op.reads
    )


def anchor_strategies(members: OpGroup, context: PropagationContext) -> Iterable[Strategy]:
    """Strategies of the anchor to try, the replicated one first.

    If readers can use some split of a letter, only such splits of it are tried; else all are, contiguous ones included.
    """
    op, book = members.anchor, context.book
    yield replicated(op)
    found: dict[str, Strategy] = (
        {s.label: s for s in book.contiguous_strategies(op)} if book.stats.ops[op.name].forward_flops else {}
    )
    for number, value in enumerate(op.outputs):
        for layout in consumable_splits(value.name, context):
            made = book.making(op, number, layout)
            if made is not None:
                found.setdefault(made.label, made)
    for number, name in enumerate(op.reads):
        for layout in (*context.splits.producible.get(name, ()), *sample_split(name, context)):
            read = book.reading(op, number, layout)
            if read is not None:
                found.setdefault(read.label, read)
    useful = {factor_of(label).letter for label, s in found.items() if is_consumable(op, s, context)}
    for label, strategy in found.items():
        needed = is_consumable(op, strategy, context) or factor_of(label).letter not in useful
        if needed and context.allows(op, strategy):
            yield strategy


def sample_split(name: str, context: PropagationContext) -> tuple[Layout, ...]:
    """The split along a value's samples; empty if samples cannot be split."""
    found = context.splits.samples.get(name) if context.batch_divides else None
    return () if found is None else (found,)


def is_consumable(op: Op, strategy: Strategy, context: PropagationContext) -> bool:
    """Whether readers can use an output of an operation in the layout that a strategy gives it."""
    return any(
        layout.partial or layout in consumable_splits(value.name, context)
        for value, layout in zip(op.outputs, strategy.outputs)
    )


def consumable_splits(name: str, context: PropagationContext) -> tuple[Layout, ...]:
    """Splits of a value that later operations can use."""
    return (*context.splits.consumable.get(name, ()), *sample_split(name, context))


def reduction_targets(members: OpGroup, chosen: Strategy, context: PropagationContext) -> tuple[Layout, ...]:
    """Layouts to which a partial output of the anchor can be reduced; replicated alone if no output is partial."""
    op, found = members.anchor, {REPLICATED: None}
    ranks = {context.book.axis.name: context.book.ranks}
    for value, layout in zip(op.outputs, chosen.outputs):
        if layout.partial:
            fitting = (x for x in consumable_splits(value.name, context) if x.fits(value.shape, ranks))
            found |= dict.fromkeys(fitting)
    return tuple(found)
