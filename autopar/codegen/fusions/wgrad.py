"""Wgrad accumulation fusion: which linear layers accumulate into the main gradient in their wgrad GEMM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.codegen.fusions.async_tp import fuse_async_tp
from autopar.ir.graph import Op, Ref
from autopar.ir.names import unused_name
from autopar.ir.program import Program
from autopar.ops.alignment import is_aligned
from autopar.ops.regions import writes_into_value
from autopar.ops.registry import differentiable_inputs, named_arguments, operand_of, signature
from autopar.ops.wgrad_accumulation import takes_products
from autopar.sharding.fuse_linear import is_layer

MainGradLookup = Callable[[str], Tensor | None]  # key of a weight's main gradient, by the weight's name


def no_main_grads(name: str) -> None:
    """The lookup that finds no main gradient."""


def fuse_wgrad(program: Program, sums: MainGradLookup) -> tuple[Program, Mapping[str, Tensor]]:
    """The program with fused linear layers (`ops.wgrad_accumulation`), and the main gradients' keys, by name.

    A layer is fused if nothing else reads its weight, its input needs a gradient, and its main gradient, or that one's
    key, is a contiguous matrix of a dtype that the GEMM supports. Layers that `fuse_async_tp` fuses with a collective
    are left, and those whose rows tensor cores cannot load: torch.compile pads these for its own products.
    """
    layers = linear_layers(program) if program.mode == "train" else {}
    if not layers:
        return program, {}
    taken = {*(name for op in program.ops for name in op.reads), *(value.name for value in program.values)}
    needed = with_needed_gradient(program)
    used: dict[str, Tensor] = {}

    def exchanged(op: Op) -> Op:
        if op.name not in layers:
            return op
        x, weight, bias = layers[op.name]
        total = sums(weight.name) if x.name in needed else None
        if total is None or not takes_products(total, getattr(torch, op.outputs[0].dtype)):
            return op
        name = unused_name(f"{weight.name}.sum", taken)
        taken.add(name)
        used[name] = total
        return replace(op, target="autopar.linear_wgrad_fused.default", args=(x, weight, bias, Ref(name)), kwargs=())

    return replace(program, ops=tuple(exchanged(op) for op in program.ops)), used


def linear_layers(program: Program) -> Mapping[str, tuple[Ref, Ref, Any]]:
    """Input, weight and bias of the linear layers, by the operation's name, as far as nothing else reads the weight, no
    collective is fused with the layer, and tensor cores can load its rows."""
    shapes, readers = program.shapes, Counter(name for op in program.ops for name in op.reads)
    layers: dict[str, tuple[Ref, Ref, Any]] = {}
    for op in fuse_async_tp(program.ops, program.results):
        if not is_layer(op):
            continue
        given = named_arguments(op)
        x, weight = given["input"], given["weight"]
        if not isinstance(x, Ref) or not isinstance(weight, Ref):
            continue
        is_fast = all(is_aligned(size, op.outputs[0].dtype) for size in shapes[weight.name])
        if is_fast and readers[weight.name] == 1 and weight.name not in program.results:
            layers[op.name] = x, weight, given["bias"]
    return layers


def with_needed_gradient(program: Program) -> Set[str]:
    """The values whose gradient is needed for the gradient of a received value or of a weight.

    torch.compile eliminates the computation of any other gradient, and with it the accumulation into a main gradient.
    """
    if any(writes_into_value(op) for op in program.ops):  # other readers of that memory are not tracked
        return set()
    like = {value.name: operand_of(value) for value in (*program.values, *(w.value for w in program.weights))}
    begins = (*(edge.value for edge in program.receives), *program.weights)
    needed = {value.name for value in begins if value.requires_grad}
    known: dict[str, tuple[frozenset[int], ...]] = {}
    for op in program.ops:
        if needed.isdisjoint(op.reads):
            continue
        read = [like[name] for name in op.reads]
        alike = signature(op, read)
        if alike not in known:
            known[alike] = differentiable_inputs(op, read)
        for value, operands in zip(op.outputs, known[alike]):
            if any(op.reads[k] in needed for k in operands):
                needed.add(value.name)
    return needed
