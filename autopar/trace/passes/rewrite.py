"""Replaces one operation by several; shapes and dtypes of their results come from runs on meta tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import Op, Ref, Value
from autopar.ir.names import unused_name
from autopar.ops.registry import meta_results, value_from


class Expansion:
    """Collects the operations that replace one; they get its module, source line and autocast region."""

    def __init__(self, op: Op, values: Mapping[str, Value], taken: Collection[str]) -> None:
        """Start without operations.

        Args:
            values: all values that the operations may read, weights included, by name.
            taken: names that new operations must not have.
        """
        self.op, self.values, self.taken = op, dict(values), set(taken)
        self.ops: list[Op] = []

    def add(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Append an operation with one output; returns a reference to the output."""
        return self.append(self.fresh(f"{self.op.name}.{target.split('.')[1].strip('_')}"), target, args, kwargs)

    def append(self, name: str, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ref:
        """As `add`, but with a name, and arguments in a tuple and a dict."""
        module, source, autocast = self.op.module, self.op.source, self.op.autocast
        op = Op(name, target, args, tuple(kwargs.items()), (), module, source, autocast=autocast)
        with torch.enable_grad():
            (made,) = meta_results(op, [self.values[read] for read in op.reads])
        self.values[name] = value_from(name, made)
        self.ops.append(replace(op, outputs=(self.values[name],)))
        return Ref(name)

    def fresh(self, name: str) -> str:
        """The name, with a number if it is taken; marks it as taken."""
        unique = unused_name(name, self.taken)
        self.taken.add(unique)
        return unique

    def value(self, ref: Ref) -> Value:
        """The value of a reference."""

        return self.values[ref.name]
