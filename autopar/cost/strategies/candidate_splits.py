"""Which splits of each value the operations around it can use, and which dim its samples are in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.strategies.rule_cache import RuleCache
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import Layout
from autopar.sharding.batch_dim import sample_dims
from autopar.sharding.rule import Strategy

MAX_SPLITS = 12  # splits of one value that are followed; a dim that many reshapes take apart could have more


@dataclass(frozen=True)
class CandidateSplits:
    """Splits by value or weight.

    Args:
        wanted: those with which an operation behind it can be split.
        offered: those that operations before it can make.
        samples: the one along the samples, whether or not the number of ranks divides them; for values that have them.
    """

    consumable: Mapping[str, tuple[Layout, ...]]
    producible: Mapping[str, tuple[Layout, ...]]
    samples: Mapping[str, Layout]

    def of_value(self, name: str) -> tuple:
        """All that is known of a value."""
        return self.consumable.get(name, ()), self.producible.get(name, ()), self.samples.get(name)


@dataclass
class SplitCollector:
    """Splits found so far, in order of appearance and without those that cannot be kept at another batch size."""

    graph: Graph
    samples: Mapping[str, Layout]
    splits: dict[str, dict[Layout, None]]

    def add(self, names: Iterable[str], layouts: Iterable[Layout]) -> None:
        """Note the split ones among the layouts of some values."""
        for name, layout in zip(names, layouts):
            if layout.splits and not depends_on_batch(layout, self.samples.get(name), self.graph.batch):
                known = self.splits.setdefault(name, {})
                if len(known) < MAX_SPLITS:
                    known[layout] = None

    def splits_of(self, name: str) -> tuple[Layout, ...]:
        """The splits of a value so far."""
        return tuple(self.splits.get(name, ()))

    @property
    def table(self) -> Mapping[str, tuple[Layout, ...]]:
        return {name: tuple(layouts) for name, layouts in self.splits.items()}


def candidate_splits(book: RuleCache, batch_divides: bool) -> CandidateSplits:
    """The splits that matter, from one walk backwards and one forwards over the graph.

    Operations with FLOPs say what they could use and make; rules of the others carry it on. So the rows of a fused
    query, key and value weight get to know that they are heads inside three parts.

    Args:
        batch_divides: whether samples can be split, in operations that multiply no weights.
    """
    samples = sample_dims(book.graph, book.rule)
    consumable, producible = SplitCollector(book.graph, samples, {}), SplitCollector(book.graph, samples, {})

    def usable(op: Op, carried: Iterable[Strategy | None]) -> Iterator[Strategy]:
        own = book.contiguous_strategies(op) if book.stats.ops[op.name].forward_flops else ()
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
    """Whether an operation may read its operands so: samples are split only where no weight is multiplied."""
    if batch_divides and not book.multiplies_weights(op):
        return True
    return not any(layout.splits and layout == samples.get(name) for name, layout in zip(op.reads, operands))


def depends_on_batch(layout: Layout, samples: Layout | None, batch: int) -> bool:
    """Whether a split counts parts inside the samples in the same dim: at another batch it would be another split."""
    if samples is None or batch == 1:
        return False
    (split,), (sample,) = layout.splits, samples.splits
    return split.dim == sample.dim and split.outer % (sample.outer * batch) == 0
