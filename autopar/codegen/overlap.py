"""Where what a linear layer reads or makes can travel while something is computed, one operation replaces two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir import Op, Ref
from autopar.operators import named_arguments

LINEAR = "aten.linear.default"
GATHER, SCATTER = "autopar.all_gather.default", "autopar.reduce_scatter.default"
FIRST_DIM = (0, 1)  # dim and outer


def overlapped(ops: Sequence[Op], kept: Collection[str]) -> list[Op]:
    """The same with `autopar.collective_linear` for a linear layer that alone reads what a collective made, or whose
    result a collective alone reads.

    Args:
        kept: values that others than these operations read too.
    """
    readers = Counter(name for op in ops for name in op.reads)
    made = {op.outputs[0].name: op for op in ops if sums_gradient(op) or is_layer(op)}
    joined: dict[str, Op] = {}
    taken: set[str] = set()
    for op in ops:
        x, *others = op.args or (None,)
        if not isinstance(x, Ref) or x in others or x.name not in made or readers[x.name] != 1 or x.name in kept:
            continue
        first = made[x.name]
        before = is_layer(op) and sums_gradient(first)
        behind = op.target == SCATTER and op.args[1:3] == FIRST_DIM and is_layer(first) and first.name not in joined
        if before or behind:
            joined[op.name] = with_collective(first, op) if before else scattered(first, op)
            taken.add(first.name)
    return [joined.get(op.name, op) for op in ops if op.name not in taken]


def is_layer(op: Op) -> bool:
    """Whether it is a linear layer of rows, and of real numbers: gradients of complex ones have conjugates."""
    return op.target == LINEAR and len(op.outputs[0].shape) > 1 and "complex" not in op.outputs[0].dtype


def sums_gradient(op: Op) -> bool:
    """Whether it brings a tensor to all ranks, each of which has a summand of its gradient."""
    partial = op.target == GATHER and op.args[-1]
    return bool(partial or op.target == "autopar.sum_gradient.default") and op.outputs[0].requires_grad


def with_collective(first: Op, linear: Op) -> Op:
    """A collective and the layer that reads what it made."""
    x, *where = first.args
    if first.target == GATHER:
        *where, _ = where  # its gradient is partial
        if tuple(where[:2]) == FIRST_DIM:
            return in_place_of(linear, linear, "gathered_rows_linear", x, where[2:])
        return in_place_of(linear, linear, "gathered_linear", x, where)
    return in_place_of(linear, linear, "summed_linear", x, where)


def scattered(linear: Op, scatter: Op) -> Op:
    """A layer and the collective that reads what it made."""
    return in_place_of(scatter, linear, "scattered_rows_linear", linear.args[0], scatter.args[3:])


def in_place_of(op: Op, linear: Op, name: str, x: Any, where: Sequence[Any]) -> Op:
    """What makes the results of ``op`` with the weights of a layer."""
    given = named_arguments(linear)
    return replace(op, target=f"autopar.{name}.default", args=(x, given["weight"], given["bias"], *where), kwargs=())
