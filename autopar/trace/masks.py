"""Removes trivial attention masks: constant masks that let everything pass.

Hugging Face's models skip such a mask after looking at its values, but not while they are traced. With a mask,
attention has no flash kernel, and a pipeline sends the mask from stage to stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import LocalDevice, Op, Ref
from autopar.ops.registry import operator

ATTENTION, MASK = "aten.scaled_dot_product_attention.default", 3  # the mask's place among its arguments


def drop_trivial_masks(ops: Iterable[Op]) -> list[Op]:
    """The operations, without trivial masks in attention."""
    ops = list(ops)
    makers = {op.name: op for op in ops}
    constants = dict.fromkeys(maybe_written(ops, makers))
    return [
        replace(op, args=(*op.args[:MASK], None, *op.args[MASK + 1 :]))
        if op.target == ATTENTION and has_trivial_mask(op, makers, constants)
        else op
        for op in ops
    ]


def has_trivial_mask(op: Op, makers: Mapping[str, Op], known: dict[str, torch.Tensor | None]) -> bool:
    """Whether an attention's mask is constant and lets everything pass."""
    mask = op.args[MASK] if len(op.args) > MASK else None
    if not isinstance(mask, Ref):
        return False
    tensor = constant_value(mask.name, makers, known)
    return tensor is not None and tensor.dtype == torch.bool and bool(tensor.all())


def maybe_written(ops: Iterable[Op], makers: Mapping[str, Op]) -> set[str]:
    """Values that an operation may write in place, and the values they were computed from: these may share memory."""
    pending = [name for op in ops if op.mutates or not op.outputs for name in op.reads]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(makers[name].reads if name in makers else ())
    return found


def constant_value(name: str, makers: Mapping[str, Op], known: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    """The tensor of a value that depends on no input, weight or random number; None for any other value.

    Args:
        known: memo of values computed so far.
    """
    if name not in known:
        op = makers.get(name)
        plain = op is not None and torch.Tag.nondeterministic_seeded not in operator(op.target).tags
        if op is None or not plain or op.mutates or any(constant_value(r, makers, known) is None for r in op.reads):
            known[name] = None
        else:
            args = [with_constants(a, known) for a in op.args]
            known[name] = operator(op.target)(*args, **{k: with_constants(v, known) for k, v in op.kwargs})
    return known[name]


def with_constants(argument: Any, known: Mapping[str, torch.Tensor | None]) -> Any:
    """An operation's argument with constant tensors in place of references."""
    if isinstance(argument, Ref):
        return known[argument.name]
    if isinstance(argument, LocalDevice):
        return torch.device("cpu")
    return [with_constants(a, known) for a in argument] if isinstance(argument, tuple) else argument
