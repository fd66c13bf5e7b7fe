"""Where what a linear layer reads or makes can travel while something is computed, one operation replaces two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Op
from autopar.ops.registry import named_arguments
from autopar.sharding.fuse_linear import FusableLinear, find_fusable


def overlapped(ops: Sequence[Op], kept: Collection[str]) -> list[Op]:
    """The same with operations of `autopar.ops.async_tp` for layers and collectives that are joined.

    Args:
        kept: values that others than these operations read too.
    """
    pairs = list(find_fusable(ops, kept))
    second = {(p.layer if p.first is p.collective else p.collective).name: one_operation(p) for p in pairs}
    first = {p.first.name for p in pairs}
    return [second.get(op.name, op) for op in ops if op.name not in first]


def one_operation(pair: FusableLinear) -> Op:
    """What makes the results of the later one of a layer and a collective."""
    given, collective = named_arguments(pair.layer), pair.collective
    behind = pair.first is pair.layer
    x: Any = given["input"] if behind else collective.args[0]
    where: tuple[Any, ...] = collective.args[1:]
    if pair.operator == "gathered_linear":
        where = where[:-1]  # its gradient is partial
    elif pair.operator == "gathered_rows_linear":
        where = where[2:-1]
    elif behind:
        where = where[2:]
    return replace(
        collective if behind else pair.layer,
        target=f"autopar.{pair.operator}.default",
        args=(x, given["weight"], given["bias"], *where),
        kwargs=(),
    )
