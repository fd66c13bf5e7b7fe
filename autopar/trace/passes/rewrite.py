"""Several operations in the place of one, with what torch says of their results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import Op, Ref, Value
from autopar.ir.names import unused_name
from autopar.ops.registry import meta_results, value_from


class Expansion:
    """Collects the operations that will stand where one stood; they share its module and its line."""

    def __init__(self, op: Op, values: Mapping[str, Value], taken: Collection[str]) -> None:
        """Begin with nothing.

        Args:
            values: everything that the operation may read, weights included.
            taken: names that new operations must not have.
        """
        self.op, self.values, self.taken = op, dict(values), set(taken)
        self.ops: list[Op] = []

    def add(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Append an operation with one output; what it makes."""
        return self.append(self.fresh(f"{self.op.name}.{target.split('.')[1].strip('_')}"), target, args, kwargs)

    def append(self, name: str, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ref:
        """The same under a given name."""
        module, source, autocast = self.op.module, self.op.source, self.op.autocast
        op = Op(name, target, args, tuple(kwargs.items()), (), module, source, autocast=autocast)
        with torch.enable_grad():
            (made,) = meta_results(op, [self.values[read] for read in op.reads])
        self.values[name] = value_from(name, made)
        self.ops.append(replace(op, outputs=(self.values[name],)))
        return Ref(name)

    def fresh(self, name: str) -> str:
        """The name, numbered where it is taken, which it is from now on."""
        unique = unused_name(name, self.taken)
        self.taken.add(unique)
        return unique

    def value(self, ref: Ref) -> Value:
        """What is known of something that can be read."""
        return self.values[ref.name]
