"""Where a gradient can travel while another one is computed, one operation replaces the two that come in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.ir import Op, Ref
from autopar.operators import named_arguments

LINEAR = "aten.linear.default"


def overlapped(ops: Sequence[Op], kept: Collection[str]) -> list[Op]:
    """The same with `autopar.collective_linear` for a linear layer that alone reads what a collective made.

    Args:
        kept: values that others than these operations read too.
    """
    readers = Counter(name for op in ops for name in op.reads)
    made = {op.outputs[0].name: op for op in ops if sums_gradient(op)}
    joined: dict[str, Op] = {}
    for op in ops:
        if op.target != LINEAR or len(op.outputs[0].shape) == 1:
            continue
        x, *others = op.args
        if isinstance(x, Ref) and x not in others and x.name in made and readers[x.name] == 1 and x.name not in kept:
            joined[op.name] = made[x.name]
    gone = {first.name for first in joined.values()}
    return [with_linear(joined[op.name], op) if op.name in joined else op for op in ops if op.name not in gone]


def sums_gradient(op: Op) -> bool:
    """Whether it brings a tensor to all ranks, each of which has a summand of its gradient."""
    partial = op.target == "autopar.all_gather.default" and op.args[-1]
    return bool(partial or op.target == "autopar.sum_gradient.default") and op.outputs[0].requires_grad


def with_linear(first: Op, linear: Op) -> Op:
    """Both in one."""
    arguments = named_arguments(linear)
    x, *where = first.args
    if first.target == "autopar.all_gather.default":
        target = "autopar.gathered_linear.default"
        where.pop()  # its gradient is partial
    else:
        target = "autopar.summed_linear.default"
    return replace(linear, target=target, args=(x, arguments["weight"], arguments["bias"], *where), kwargs=())
