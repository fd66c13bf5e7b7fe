"""Several operations in the place of one, with what torch says of their results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from autopar.ir import LocalDevice, Op, Ref, Value
from autopar.operators import operator

META = torch.device("meta")


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
        with torch.enable_grad():
            made = operator(target)(*self.on_meta(args), **{k: self.on_meta(v) for k, v in kwargs.items()})
        dtype = str(made.dtype).removeprefix("torch.")
        value = Value(name, tuple(made.shape), dtype, tuple(made.stride()), made.requires_grad)
        self.values[name] = value
        module, source, autocast = self.op.module, self.op.source, self.op.autocast
        self.ops.append(Op(name, target, args, tuple(kwargs.items()), (value,), module, source, autocast=autocast))
        return Ref(name)

    def fresh(self, name: str) -> str:
        """The name, numbered where it is taken."""
        unique, count = name, 0
        while unique in self.taken:
            count += 1
            unique = f"{name}_{count}"
        self.taken.add(unique)
        return unique

    def value(self, ref: Ref) -> Value:
        """What is known of something that can be read."""
        return self.values[ref.name]

    def on_meta(self, tree: Any) -> Any:
        """Arguments with every reference replaced by an empty tensor like it."""
        if isinstance(tree, Ref):
            value = self.values[tree.name]
            tensor = torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device=META)
            return tensor.requires_grad_(value.requires_grad)
        if isinstance(tree, LocalDevice):
            return META
        return tuple(self.on_meta(item) for item in tree) if isinstance(tree, tuple) else tree
