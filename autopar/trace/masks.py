"""Attention masks that hide nothing, which a trace brings along where the model itself does without.

Hugging Face's models skip such a mask by looking at its values, but not while they are traced. With one, attention has
no flash kernel, and a pipeline would send it from stage to stage.
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
    """The operations, with no mask where attention is given one of constants that lets everything pass."""
    ops = list(ops)
    makers = {op.name: op for op in ops}
    known = dict.fromkeys(maybe_written(ops, makers))
    return [without_mask(op) if op.target == ATTENTION and has_trivial_mask(op, makers, known) else op for op in ops]


def has_trivial_mask(op: Op, makers: Mapping[str, Op], known: dict[str, torch.Tensor | None]) -> bool:
    """Whether an attention's mask lets everything pass, whatever the model's inputs and weights are."""
    mask = op.args[MASK] if len(op.args) > MASK else None
    if not isinstance(mask, Ref):
        return False
    tensor = constant_value(mask.name, makers, known)
    return tensor is not None and tensor.dtype == torch.bool and bool(tensor.all())


def without_mask(op: Op) -> Op:
    return replace(op, args=(*op.args[:MASK], None, *op.args[MASK + 1 :]))


def maybe_written(ops: Iterable[Op], makers: Mapping[str, Op]) -> set[str]:
    """Values that an operation may write in place, and all that these were made from and may share memory with."""
    pending = [name for op in ops if op.mutates or not op.outputs for name in op.reads]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(makers[name].reads if name in makers else ())
    return found


def constant_value(name: str, makers: Mapping[str, Op], known: dict[str, torch.Tensor | None]) -> torch.Tensor | None:
    """A value that depends on no input, weight or random number; None for any other. ``known`` keeps what was found."""
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
    """An operation's argument with tensors in place of references."""
    if isinstance(argument, Ref):
        return known[argument.name]
    if isinstance(argument, LocalDevice):
        return torch.device("cpu")
    return [with_constants(a, known) for a in argument] if isinstance(argument, tuple) else argument
