"""Splits of each value that operations before it can make and operations after it can use; the dim of its samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.strategies.rule_cache import RuleCache
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import Layout, split_layout
from autopar.sharding.batch_dim import sample_dims
from autopar.sharding.rule import Strategy

MAX_SPLITS = 12  # splits of one value that are propagated; a dim that many reshapes divide could have more


@dataclass(frozen=True)
class CandidateSplits:
    """Candidate splits of each value or weight, by name.

    Args:
        consumable: splits with which a later operation can run split.
        producible: splits that an earlier operation can make.
        samples: the split along the samples, whether or not the number of ranks divides them; absent without samples.
    """

    consumable: Mapping[str, tuple[Layout, ...]]
    producible: Mapping[str, tuple[Layout, ...]]
    samples: Mapping[str, Layout]

    def of_value(self, name: str) -> tuple:
        """The three entries of one value."""
        return self.consumable.get(name, ()), self.producible.get(name, ()), self.samples.get(name)


@dataclass
class SplitCollector:
    """Splits collected so far, in order of appearance, without splits that would differ at another batch size."""

    graph: Graph
    samples: Mapping[str, Layout]
    splits: dict[str, dict[Layout, None]]

    def add(self, names: Iterable[str], layouts: Iterable[Layout]) -> None:
        """Add the layouts that are splits; one layout for each name."""
        for name, layout in zip(names, layouts):
            if layout.splits and not depends_on_batch(layout, self.samples.get(name), self.graph.batch):
                known = self.splits.setdefault(name, {})
                if len(known) < MAX_SPLITS:
                    known[layout] = None

    def splits_of(self, name: str) -> tuple[Layout, ...]:
        """Splits of a value collected so far."""
        return tuple(self.splits.get(name, ()))

    @property
    def table(self) -> Mapping[str, tuple[Layout, ...]]:
        """Splits by value."""
        return {name: tuple(layouts) for name, layouts in self.splits.items()}


def candidate_splits(book: RuleCache, batch_divides: bool) -> CandidateSplits:
    """Candidate splits of all values, from one pass backwards and one forwards over the graph.

    Operations with FLOPs, and collectives of outer axes, contribute splits that they can use or make; the rules of
    other operations propagate them. So the rows of a fused query-key-value weight get the split "heads within three
    parts".

    Args:
        batch_divides: whether samples can be split, in operations that multiply no weights.
    """
    samples = sample_dims(book.graph, book.rule, book.axis.name)
    consumable, producible = SplitCollector(book.graph, samples, {}), SplitCollector(book.graph, samples, {})

    def usable(op: Op, carried: Iterable[Strategy | None]) -> Iterator[Strategy]:
        contributes = op.home or book.stats.ops[op.name].forward_flops
        own = book.contiguous_strategies(op) if contributes else ()
        for found in (*own, *carried):
            if found is not None and may_read(found.operands, op, book, samples, batch_divides):
                yield found

    for op in reversed(book.graph.ops):
        made = (book.making(op, j, layout) for j, v in enumerate(op.outputs) for layout in consumable.splits_of(v.name))
        for found in usable(op, made):
            consumable.add(op.reads, found.operands)
    for op in book.graph.ops:
        read = (book.reading(op, i, layout) for i, name in enumerate(op.reads) for layout in producible.splits_of(name))
        for found in usable(op, read):
            producible.add((v.name for v in op.outputs), found.outputs)
    return CandidateSplits(consumable.table, producible.table, samples)


def may_read(
    operands: Iterable[Layout], op: Op, book: RuleCache, samples: Mapping[str, Layout], batch_divides: bool
) -> bool:
    """Whether an operation may read operands in these layouts.

    Samples are split only if no weight is multiplied, and never raggedly.
    """
    operands = tuple(operands)
    for name, layout in zip(op.reads, operands):
        if layout.ragged and (sample := samples.get(name)) is not None:
            (split,) = layout.splits
            if split_layout(split.dim, split.outer, split.axis) == sample:
                return False
    if batch_divides and not book.multiplies_weights(op):
        return True
    return not any(splits_samples(layout, samples.get(name), book) for name, layout in zip(op.reads, operands))


def splits_samples(layout: Layout, samples: Layout | None, book: RuleCache) -> bool:
    """Whether a layout splits samples, in the order of the value's or, as outer axes leave it, another one."""
    if samples is None or not layout.splits:
        return False
    (split,), (sample,) = layout.splits, samples.splits
    if split.dim != sample.dim or split.outer % sample.outer:
        return False
    return book.graph.batch % (split.outer // sample.outer * book.ranks) == 0 or split == sample


def depends_on_batch(layout: Layout, samples: Layout | None, batch: int) -> bool:
    """Whether a split lies within the samples of the same dim, so that it would be another split at another batch."""
    if samples is None or batch == 1:
        return False
    (split,), (sample,) = layout.splits, samples.splits
    return split.dim == sample.dim and split.outer % (sample.outer * batch) == 0
