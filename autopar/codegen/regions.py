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


# Comparisons and arithmetic of a random mask and a number, and their forms for a tensor [].
COMPARISONS = {"aten.lt.Scalar": "aten.lt.Tensor", "aten.ge.Scalar": "aten.ge.Tensor"}
SCALINGS = {
    "aten.div.Scalar": "aten.div.Tensor", "aten.div.Tensor": "aten.div.Tensor",
    "aten.mul.Scalar": "aten.mul.Tensor", "aten.mul.Tensor": "aten.mul.Tensor",
}  # fmt: skip
CAST = "aten.to.dtype"


def with_random_arguments(ops: Sequence[Op]) -> tuple[list[Op], dict[str, Tensor]]:
    """The operations with tensors for what differs in the random masks of equal blocks, and these tensors by name.

    Those are the hashes of names, and the rates of stochastic depth, which grow from block to block. Results are equal
    to the last bit: a mask is scaled in float32, as kernels scale it.
    """
    tensors: dict[str, Tensor] = {}
    masks: dict[str, str] = {}  # dtypes of values that depend on nothing but random numbers
    changed: list[Op] = []

    def constant(op: Op, number: float, dtype: torch.dtype) -> Ref:
        tensors[f"{op.name}.number"] = torch.tensor(number, dtype=dtype, device="cpu")
        return Ref(f"{op.name}.number")

    for op in ops:
        first, second = (*op.args, None, None)[:2]
        if op.target == "autopar.uniform.default":
            draws, shape, name, *part = op.args
            args = (draws, constant(op, name_hash(name), torch.int64), shape, *part)
            op = replace(op, target="autopar.uniform_numbered.default", args=args)
        elif not op.reads or op.kwargs or not masks.keys() >= set(op.reads):
            changed.append(op)
            continue
        elif op.target in COMPARISONS and isinstance(second, int | float) and masks[op.reads[0]] == "float32":
            args = (first, constant(op, second, torch.float32))
            op = replace(op, target=COMPARISONS[op.target], args=args)
        elif (
            op.target in SCALINGS
            and isinstance(second, int | float)
            and op.outputs[0].dtype.startswith(("bfloat", "float"))
        ):
            changed += scaled_mask(op, lambda dtype, op=op, second=second: constant(op, second, dtype))
            masks[op.name] = op.outputs[0].dtype
            continue
        elif op.target != CAST:
            changed.append(op)
            continue
        masks |= {value.name: value.dtype for value in op.outputs}
        changed.append(op)
    return changed, tensors


def scaled_mask(op: Op, number: Callable[[torch.dtype], Ref]) -> list[Op]:
    """The operations for a mask times or by a number: in float32 at least, then in the mask's dtype.

    Args:
        number: makes the tensor of a dtype.
    """
    (made,), target = op.outputs, SCALINGS[op.target]
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
