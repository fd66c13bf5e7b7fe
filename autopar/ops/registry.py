"""Operators behind the targets that operations name: their arguments, and their results on tensors without data.

torch's own meta kernels compute these results.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import autopar.ops.async_tp.input_grad
import autopar.ops.async_tp.pipelined
import autopar.ops.collectives
import autopar.ops.counter_rng
import autopar.ops.gradient_layout
import autopar.ops.padded_convolution
import autopar.ops.patch_embed
import autopar.ops.space.mean
import autopar.ops.space.norms
import autopar.ops.space.resize
import autopar.ops.space.windows
import autopar.ops.split_backward
import autopar.ops.wgrad_accumulation  # noqa: F401  (these define operators of torch.ops.autopar)
from autopar.ir.graph import Graph, LocalDevice, Op, Ref, Value, dtype_name

META = torch.device("meta")
# Their statistics cover more elements than one thread block holds: a pass for statistics, and another for values.
CHANNEL_NORMS = frozenset(f"aten.{name}.default" for name in ("batch_norm", "group_norm", "instance_norm"))


@functools.cache
def operator(target: str) -> Any:
    """The operator behind ``namespace.name.overload``: ``aten.linear.default``, ``autopar.all_reduce.default``."""
    return functools.reduce(getattr, target.split("."), torch.ops)


def named_arguments(op: Op) -> dict[str, Any]:
    """All arguments of an operation by name, defaults included."""
    schema = operator(op.target)._schema.arguments
    arguments = dict(zip((a.name for a in schema), op.args)) | dict(op.kwargs)
    return arguments | {a.name: a.default_value for a in schema if a.has_default_value() and a.name not in arguments}


def for_each_dim(value: Any, dims: int) -> tuple[Any, ...]:
    """An argument with one value for each dim, from one that has them, or one for all."""
    listed = tuple(value) if isinstance(value, Sequence) else (value,)
    return listed * dims if len(listed) == 1 else listed


def returns_view(op: Op) -> bool:
    """Whether the result of an operation may share memory with its first argument."""
    return any(result.alias_info is not None for result in operator(op.target)._schema.returns)


def memory_of(graph: Graph, name: str) -> str:
    """Name of the weight or value whose memory a value may be a view of."""
    while (maker := graph.producer.get(name)) is not None and returns_view(maker):
        name = maker.reads[0]
    return name


def views_of_weights(ops: Iterable[Op], weights: Collection[str]) -> dict[str, str]:
    """The weight of which each value may be a view; other values are left out."""
    viewed: dict[str, str] = {}
    for op in ops:
        if op.reads and returns_view(op) and (root := viewed.get(op.reads[0], op.reads[0])) in weights:
            viewed |= {value.name: root for value in op.outputs}
    return viewed


# -- without data ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor as an operation reads it: a `Value` without a name."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class OperandSlot:
    """Stands for operand ``index``; operations that differ only in names become equal."""

    index: int


def operand_of(value: Value) -> Operand:
    """The operand that a value is to its readers."""
    return Operand(value.shape, value.dtype, value.stride, value.requires_grad)


def operand_from(tensor: Tensor) -> Operand:
    """As `operand_of`, for a tensor instead of a value."""
    return Operand(tuple(tensor.shape), dtype_name(tensor.dtype), tuple(tensor.stride()), tensor.requires_grad)


def value_from(name: str, tensor: Tensor) -> Value:
    """A tensor as a value of the graph."""
    return Value(name, tuple(tensor.shape), dtype_name(tensor.dtype), tuple(tensor.stride()), tensor.requires_grad)


def meta_tensor(like: Operand | Value) -> Tensor:
    """A tensor without data."""
    tensor = torch.empty_strided(like.shape, like.stride, dtype=getattr(torch, like.dtype), device=META)
    return tensor.requires_grad_(like.requires_grad)


def slotted_arguments(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with slots in place of operands and meta in place of local devices."""

    def convert(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return OperandSlot(op.reads.index(tree.name))
        if isinstance(tree, LocalDevice):
            return META
        if tree == op.name:  # a random operation has its own name as an argument
            return ""
        return tuple(convert(item) for item in tree) if isinstance(tree, tuple) else tree

    return convert(op.args), {name: convert(value) for name, value in op.kwargs}


def fill_slots(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Arguments with tensors in place of slots."""
    if isinstance(tree, OperandSlot):
        return tensors[tree.index]
    return tuple(fill_slots(item, tensors) for item in tree) if isinstance(tree, tuple) else tree


def meta_results(op: Op, read: Sequence[Operand | Value]) -> list[Tensor]:
    """As `results_of`, on meta tensors like ``read``."""
    return results_of(op, [meta_tensor(like) for like in read])


def results_of(op: Op, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The result tensors of an operation; ``tensors`` are its operands in the order of ``Op.reads``.

    Raises:
        RuntimeError: torch refuses the operands, or has no meta kernel.
    """
    args, kwargs = slotted_arguments(op)
    results = operator(op.target)(
        *fill_slots(args, tensors), **{name: fill_slots(x, tensors) for name, x in kwargs.items()}
    )
    return [t for t in (results if isinstance(results, list | tuple) else (results,)) if isinstance(t, Tensor)]


def signature(op: Op, read: Sequence[Operand | Value]) -> str:
    """A text that is equal for operations that compute equal results from equal operands."""
    return repr((op.target, slotted_arguments(op), tuple(read)))


def differentiable_inputs(op: Op, read: Sequence[Operand | Value]) -> tuple[frozenset[int], ...]:
    """For each result the numbers of the operands whose gradient depends on the result's gradient.

    The gradient of ``round`` is zeros for any input, and ``a.type_as(b)`` reads only the dtype of ``b``. Results of
    operations that torch cannot differentiate without data have no such operands.
    """
    leaves = [meta_tensor(like) for like in read]
    tracked = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]

    def inputs_of_gradient(result: Tensor) -> frozenset[int]:
        if not result.requires_grad:
            return frozenset()
        # create_graph shows whether an operand's gradient depends on the result's, as a second derivative needs.
        result_gradient = torch.empty_like(result).requires_grad_()
        inputs = [leaves[number] for number in tracked]
        gradients = torch.autograd.grad(
            result, inputs, result_gradient, retain_graph=True, create_graph=True, allow_unused=True
        )
        return frozenset(number for number, g in zip(tracked, gradients) if g is not None and g.requires_grad)

    try:
        with torch.enable_grad():
            return tuple(inputs_of_gradient(result) for result in results_of(op, leaves))
    except RuntimeError:  # includes NotImplementedError
        return ()
