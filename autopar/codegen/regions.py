"""Compiled regions of a graph that runs as one program, and operations without what tells equal regions apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from autopar.codegen.activation_checkpoint import Segment, cut_segments
from autopar.codegen.split import split
from autopar.ir.graph import Graph, Op, Ref, Value
from autopar.ops.counter_rng import name_hash
from autopar.ops.regions import region_starts


def regions_of(graph: Graph) -> tuple[Segment, ...]:
    """Regions of a graph on a single stage, as `autopar.codegen.emit.graph_module` compiles them."""
    (program,) = split(graph, dict.fromkeys((op.name for op in graph.ops), 0), 1)
    bounds = (*region_starts(program.ops, program.output_boundaries), len(program.ops))
    return cut_segments(program.ops, pairwise(bounds), graph.weight, program.results, "region")


@dataclass(frozen=True)
class NumberedOps:
    """Operations whose names are numbers, and the new name of every weight and value."""

    ops: tuple[Op, ...]
    names: Mapping[str, str]


def numbered_ops(ops: Sequence[Op], weights: Iterable[str], reads: Iterable[str]) -> NumberedOps:
    """The operations as v0, v1, …, with their weights as w0, w1, … and the values that they read as x0, x1, …"""
    names = {name: f"w{k}" for k, name in enumerate(weights)} | {name: f"x{k}" for k, name in enumerate(reads)}
    result: list[Op] = []
    for number, op in enumerate(ops):
        name = f"v{number}"
        names |= {v.name: v.name.replace(op.name, name, 1) for v in op.outputs}
        outputs = tuple(replace(v, name=names[v.name]) for v in op.outputs)
        mutates = tuple(names[n] for n in op.mutates)
        result.append(replace(op.reading(names), name=name, outputs=outputs, mutates=mutates))
    return NumberedOps(tuple(result), names)


# Operations of a random mask and a number, and their forms for a tensor [].
COMPARISONS = {"aten.lt.Scalar": "aten.lt.Tensor", "aten.ge.Scalar": "aten.ge.Tensor"}
ADDITION = "aten.add.Tensor"
ARITHMETIC = {
    ADDITION: ADDITION,
    "aten.div.Scalar": "aten.div.Tensor", "aten.div.Tensor": "aten.div.Tensor",
    "aten.mul.Scalar": "aten.mul.Tensor", "aten.mul.Tensor": "aten.mul.Tensor",
}  # fmt: skip
CAST = "aten.to.dtype"
PASSED_ON = (CAST, "aten.floor.default")


def with_random_arguments(ops: Iterable[Op]) -> tuple[list[Op], dict[str, Tensor]]:
    """The operations with tensors for what differs in the random masks of equal blocks, and these tensors by name.

    Those are the hashes of names, and the rates of stochastic depth, which grow from block to block. Arithmetic with
    these tensors is in float32, as in kernels.
    """
    masks = RandomMasks()
    return [changed for op in ops for changed in masks.rewritten(op)], masks.tensors


class RandomMasks:
    """The random masks among operations that are rewritten one after the other.

    Attributes:
        tensors: made for the numbers of masks, by name.
        dtypes: of values that depend on nothing but random numbers, by name.
        added: numbers that were added to random ones. `floor(rand + keep)` is a mask whose rate is no operand of a
            comparison; the masked tensor is divided by the same number (transformers).
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.added: set[float] = set()

    def rewritten(self, op: Op) -> Sequence[Op]:
        """The operations that replace one."""
        if op.target == "autopar.uniform.default":
            draws, shape, name, *part = op.args
            args = (draws, self.tensor(op, name_hash(name), torch.int64), shape, *part)
            return self.masked([replace(op, target="autopar.uniform_numbered.default", args=args)])
        first, second = (*op.args, None, None)[:2]
        is_mask = bool(op.reads) and self.dtypes.keys() >= set(op.reads)
        if is_mask and op.target in PASSED_ON:
            return self.masked([op])
        if op.kwargs or not isinstance(second, int | float):
            return [op]
        if is_mask and op.target in COMPARISONS and self.dtypes[op.reads[0]] == "float32":
            args = (first, self.tensor(op, second, torch.float32))
            return self.masked([replace(op, target=COMPARISONS[op.target], args=args)])
        if op.target not in ARITHMETIC or not op.outputs[0].dtype.startswith(("bfloat", "float")):
            return [op]
        if is_mask and op.target == ADDITION:
            self.added.add(second)
        elif not is_mask and (op.target == ADDITION or second not in self.added):
            return [op]
        computed = in_float32(op, lambda dtype: self.tensor(op, second, dtype))
        return self.masked(computed) if is_mask else computed

    def masked(self, ops: Sequence[Op]) -> Sequence[Op]:
        """These operations, whose results are masks."""
        self.dtypes |= {value.name: value.dtype for op in ops for value in op.outputs}
        return ops

    def tensor(self, op: Op, number: float, dtype: torch.dtype) -> Ref:
        """Reference to a new tensor [] that takes the place of an operation's number."""
        name = f"{op.name}.number"
        self.tensors[name] = torch.tensor(number, dtype=dtype, device="cpu")
        return Ref(name)


def in_float32(op: Op, number: Callable[[torch.dtype], Ref]) -> list[Op]:
    """The operations for the arithmetic of a tensor and a number: in float32 at least, then in the tensor's dtype.

    Args:
        number: makes the tensor of a dtype.
    """
    (made,), target = op.outputs, ARITHMETIC[op.target]
    if made.dtype in ("float32", "float64"):
        return [replace(op, target=target, args=(op.args[0], number(getattr(torch, made.dtype))))]
    wide, scaled = f"{op.name}.wide", f"{op.name}.scaled"
    return [
        replace(op, name=wide, target=CAST, args=(op.args[0], torch.float32), outputs=(float32(made, wide),)),
        replace(op, name=scaled, target=target, args=(Ref(wide), number(torch.float32)),
                outputs=(float32(made, scaled),)),
        replace(op, target=CAST, args=(Ref(scaled), getattr(torch, made.dtype))),
    ]  # fmt: skip


def float32(value: Value, name: str) -> Value:
    """A value like another, of float32."""
    return replace(value, name=name, dtype="float32")
