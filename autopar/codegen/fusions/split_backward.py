"""Split backwards: which layers of a training program leave their weights' gradients for later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import Any

from autopar.codegen.fusions.pad_groups import as_padded
from autopar.codegen.fusions.patch_embed import as_product
from autopar.codegen.fusions.wgrad import linear_layers, with_needed_gradient
from autopar.ir.graph import Op, Ref, Value
from autopar.ir.names import unused_name
from autopar.ir.program import Convolution, DeferredWgrad, Program
from autopar.ops.padded_convolution import CONVOLUTIONS
from autopar.ops.registry import for_each_dim, named_arguments

Shapes = Mapping[str, Sequence[int]]
MakeSlot = Callable[[str, Value, Sequence[int]], Value]  # from a name, a value of its dtype, and a shape


def split_backward(program: Program, compiled: bool) -> Program:
    """The program with linear layers and convolutions that leave their weights' gradients for later.

    A layer is split if its weight is trained and nothing else reads it. Whole are layers that are fused with a
    collective, those that compiled programs replace by other kernels, and everything else with weights: norms, scales,
    biases of linear layers.

    Args:
        compiled: whether the program will be compiled. The gradient of a convolution's bias is then a sum in a fused
            kernel, otherwise it is computed together with that of the weight.
    """
    if program.mode != "train":
        return program
    layers, shapes = linear_layers(program), program.shapes
    readers = Counter(name for op in program.ops for name in op.reads)
    alone = {w.name for w in program.weights if w.requires_grad and readers[w.name] == 1} - {*program.results}
    needed = with_needed_gradient(program) if compiled else frozenset()
    taken = {*readers, *(value.name for value in program.values)}
    deferred: list[DeferredWgrad] = []

    def slot(name: str, value: Value, shape: Sequence[int]) -> Value:
        made = unused_name(name, taken)
        taken.add(made)
        return Value(made, tuple(shape), value.dtype, (0,) * len(shape), requires_grad=True)

    def split(op: Op) -> Op:
        if op.name in layers and layers[op.name][1].name in alone:
            made, target, arguments = split_linear(op, layers[op.name], shapes, needed, slot)
        elif is_plain_convolution(op, shapes) and {ref.name for ref in trained_arguments(op)} <= alone:
            made, target, arguments = split_convolution(op, shapes, compiled, slot)
        else:
            return op
        deferred.append(made)
        return replace(op, target=target, args=(*arguments, *(Ref(s.name) for s in made.slots)), kwargs=())

    ops = tuple(split(op) for op in program.ops)
    return replace(program, ops=ops, deferred=tuple(deferred))


def split_linear(
    op: Op, layer: tuple[Ref, Ref, Any], shapes: Shapes, needed: Set[str], slot: MakeSlot
) -> tuple[DeferredWgrad, str, tuple[Any, ...]]:
    """The deferred gradient of a linear layer's weight; target and arguments of the operation in the layer's place."""
    x, weight, _ = layer
    (out, width), result = shapes[weight.name], op.outputs[0]
    rows = prod(result.shape[:-1])
    grad, given = slot(f"{op.name}.grad", result, (rows, out)), slot(f"{op.name}.input", result, (rows, width))
    made = DeferredWgrad(weight.name, grad, given, accumulates=x.name in needed)
    return made, "autopar.linear_split.default", layer


def split_convolution(
    op: Op, shapes: Shapes, compiled: bool, slot: MakeSlot
) -> tuple[DeferredWgrad, str, tuple[Any, ...]]:
    """As `split_linear`, of a convolution."""
    given, result = named_arguments(op), op.outputs[0]
    x, weight, bias = given["input"], given["weight"], given["bias"]
    dims = len(shapes[weight.name]) - 2
    stride, padding, dilation = (for_each_dim(given[k], dims) for k in ("stride", "padding", "dilation"))
    form = Convolution(stride, padding, dilation, given["groups"])
    made = DeferredWgrad(
        weight.name,
        slot(f"{op.name}.grad", result, result.shape),
        slot(f"{op.name}.input", result, shapes[x.name]),
        accumulates=False,
        convolution=form,
        bias=bias.name if bias is not None and not compiled else "",
    )
    arguments = (x, weight, bias, stride, padding, dilation, form.groups, compiled)
    return made, "autopar.convolution_split.default", arguments


def trained_arguments(op: Op) -> list[Ref]:
    """Weight and bias of a convolution."""
    given = named_arguments(op)
    return [given[name] for name in ("weight", "bias") if given[name] is not None]


def is_plain_convolution(op: Op, shapes: Shapes) -> bool:
    """Whether an operation is a convolution of a batch with a weight, which no other kernel replaces."""
    if op.target not in CONVOLUTIONS:
        return False
    given = named_arguments(op)
    if not isinstance(given["weight"], Ref) or not isinstance(given["input"], Ref):
        return False
    is_batched = len(op.outputs[0].shape) == len(shapes[given["weight"].name])
    return is_batched and as_product(op, shapes) is op and as_padded(op, shapes) is op
