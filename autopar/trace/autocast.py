"""Autocast regions as explicit casts, so that the graph gives the same numbers without any autocast around it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from autopar.ir import LocalDevice, Ref, Value, refs


def cast_to(target: OpOverload, args: tuple, kwargs: tuple, val: Any, values: dict[str, Value]) -> torch.dtype | None:
    """The dtype to which autocast casts an operation's floating inputs; None where it leaves them alone.

    Autocast is known by its effect: the operation's result has another dtype than the same call gives without it.

    Args:
        val: the traced result.
        values: everything that the arguments may refer to.
    """
    traced = next((t for t in (val if isinstance(val, list | tuple) else [val]) if isinstance(t, torch.Tensor)), None)
    inputs = {values[name].dtype for name in refs((args, tuple(v for _, v in kwargs)))}
    if traced is None or not traced.is_floating_point() or {getattr(torch, d) for d in inputs} == {traced.dtype}:
        return None
    try:
        plain = target(*on_meta(args, values), **{k: on_meta(v, values) for k, v in kwargs})
    except RuntimeError:  # without autocast the dtypes do not even go together
        return traced.dtype
    plain = plain[0] if isinstance(plain, list | tuple) else plain
    return None if plain.dtype == traced.dtype else traced.dtype


def on_meta(argument: Any, values: dict[str, Value]) -> Any:
    """An argument with every reference replaced by an empty tensor like it."""
    if isinstance(argument, Ref):
        value = values[argument.name]
        return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")
    if isinstance(argument, LocalDevice):
        return torch.device("meta")
    if isinstance(argument, tuple):
        return type(argument)(on_meta(a, values) for a in argument)
    return argument
