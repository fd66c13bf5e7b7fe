"""One rank's part of an operation, before its arguments are rewritten for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.graph import Op
from autopar.ir.layout import Layout, Split
from autopar.sharding.bound_call import Shape
from autopar.sharding.rule import Factor, Halo, Rule


@dataclass(frozen=True)
class LocalOp:
    """An operation with its rule, its outputs' layouts and local shapes, the factor that is split, and the ranks."""

    op: Op
    rule: Rule
    layouts: tuple[Layout, ...]
    shapes: tuple[Shape, ...]
    factor: Factor
    ranks: int
    rank: int

    @property
    def letter(self) -> str:
        """The letter that is split; empty where none is."""
        return self.factor.letter

    @property
    def halo(self) -> Halo:
        """Elements that a rank gets from its neighbours."""
        return self.rule.halos.get(self.letter, Halo(0, 0))

    def share(self, size: int) -> int:
        """This rank's number of a letter's ``size`` elements."""
        split = Split(0, self.factor.parts, unit=self.factor.unit)
        return self.factor.parts * len(split.part(size, self.ranks, self.rank))


def with_argument(op: Op, position: int, name: str, value: Any) -> Op:
    """The operation with another value of an argument, given by position or by name."""
    if len(op.args) > position:
        return replace(op, args=(*op.args[:position], value, *op.args[position + 1 :]))
    return replace(op, kwargs=tuple((dict(op.kwargs) | {name: value}).items()))
