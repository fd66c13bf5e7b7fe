"""Sharding rules of a graph's operations; each distinct operation is looked up once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.groups.grouping import batch_dependent_names
from autopar.cost.ops.op_stats import ATTENTION, GraphStats
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import Layout
from autopar.ir.tensor_axes import TensorAxis
from autopar.sharding.lookup import local_rule
from autopar.sharding.propagate import updated_in_place
from autopar.sharding.rule import Rule, Strategy, by_operand, by_output, strategies

PIXEL_LETTER = re.compile(r"y\d")  # of height, width and depth in `autopar.sharding.functions.pixels`


@dataclass(frozen=True)
class RuleCache:
    """Rules and strategies of a graph's operations on one axis.

    Operations that share an `OpStats` object differ in names alone, so that they have the same rules and strategies.

    Args:
        ragged: whether any letter that the ranks do not divide may be split raggedly, or only the heads of attention.
    """

    graph: Graph
    stats: GraphStats
    axis: TensorAxis
    ragged: bool = False
    rules: dict[int, Rule | None] = field(default_factory=dict, repr=False)
    by_layout: dict[tuple, Strategy | None] = field(default_factory=dict, repr=False)
    contiguous: dict[int, tuple[Strategy, ...]] = field(default_factory=dict, repr=False)

    @property
    def ranks(self) -> int:
        """Number of ranks of the axis."""
        return self.axis.ranks

    @cached_property
    def batch_dependent(self) -> frozenset[str]:
        """Operations and values that depend on a graph input."""
        return batch_dependent_names(self.graph)

    @cached_property
    def always_replicated(self) -> frozenset[str]:
        """Operations that are replicated regardless of their rule: they touch memory that is updated in place."""
        return updated_in_place(self.graph)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Values and weights that have a gradient."""
        return frozenset(x.name for x in (*self.graph.values.values(), *self.graph.weights) if x.requires_grad)

    @cached_property
    def readers(self) -> Mapping[str, list[Op]]:
        """The operations that read each operation's outputs, by its name."""
        found: dict[str, list[Op]] = {op.name: [] for op in self.graph.ops}
        for op in self.graph.ops:
            for name in op.reads:
                if name in self.graph.producer:
                    found[self.graph.producer[name].name].append(op)
        return found

    def key(self, op: Op) -> int:
        """A key that is equal for operations that differ in names alone."""
        return id(self.stats.ops[op.name])

    def rule(self, op: Op) -> Rule | None:
        """An operation's rule; None if it has none or is always replicated."""
        if op.name in self.always_replicated:
            return None
        key = self.key(op)
        if key not in self.rules:
            self.rules[key] = local_rule(op, self.graph)
        return self.rules[key]

    def contiguous_strategies(self, op: Op) -> tuple[Strategy, ...]:
        """Strategies that split one letter of the rule contiguously; of height and width the longer one, or height.

        Parts of the longer one have the smaller halo, and all feature maps of a picture have about its proportions.
        """
        rule, key = self.rule(op), self.key(op)
        if rule is None:
            return ()
        if key not in self.contiguous:
            heads = rule.outputs[0][1:-2] if op.target == ATTENTION else ()
            ragged = rule.free if self.ragged else [letter for dim in heads for letter in dim]
            found = strategies(rule, self.ranks, {}, ragged, self.axis.name)[1:]
            pixels = {s.label: rule.sizes[s.label] for s in found if PIXEL_LETTER.fullmatch(s.label)}
            longest = max(pixels, key=pixels.__getitem__, default="")
            self.contiguous[key] = tuple(s for s in found if s.label not in pixels or s.label == longest)
        return self.contiguous[key]

    def reading(self, op: Op, number: int, layout: Layout) -> Strategy | None:
        """The strategy that reads operand ``number`` in a layout; None if the rule has none."""
        return self.look_up("reads", op, number, layout)

    def making(self, op: Op, number: int, layout: Layout) -> Strategy | None:
        """The strategy that makes output ``number`` in a layout; None if the rule has none."""
        return self.look_up("makes", op, number, layout)

    def look_up(self, side: str, op: Op, number: int, layout: Layout) -> Strategy | None:
        """The strategy with this layout of an operand ("reads") or an output ("makes")."""
        rule = self.rule(op)
        if rule is None:
            return None
        key = (side, self.key(op), number, layout)
        if key not in self.by_layout:
            find = by_operand if side == "reads" else by_output
            self.by_layout[key] = find(rule, number, layout, self.ranks)
        return self.by_layout[key]

    def multiplies_weights(self, op: Op) -> bool:
        """Whether an operation multiplies activations with a weight. Data parallelism splits the samples of those."""

        flops = self.stats.ops[op.name].forward_flops
        return flops > 0 and op.target != ATTENTION and not self.batch_dependent.issuperset(op.reads)
