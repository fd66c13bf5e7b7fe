"""Padding of groups (`autopar.ops.padded_convolution`): which grouped convolutions of a program on a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Op, Ref
from autopar.ir.program import Program
from autopar.ops.padded_convolution import CONVOLUTIONS, group_widths
from autopar.ops.registry import for_each_dim, named_arguments

ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def pad_groups(program: Program) -> Program:
    """The program with padded groups wherever cuDNN lacks kernels for a convolution's own."""
    shapes = program.shapes
    return replace(program, ops=tuple(as_padded(op, shapes) for op in program.ops))


def as_padded(op: Op, shapes: Mapping[str, Sequence[int]]) -> Op:
    """The convolution with padded groups; the operation itself if it needs none."""
    if op.target not in CONVOLUTIONS:
        return op
    given = named_arguments(op)
    weight, groups = given["weight"], given["groups"]
    assert isinstance(weight, Ref), f"{op.name}: a convolution with a constant"
    shape = shapes[weight.name]
    if group_widths(op, shape, groups) == (shape[1], shape[0] // groups):
        return op
    lists = {k: for_each_dim(given[k], len(shape) - 2) for k in ("stride", "padding", "dilation")}
    args = tuple((given | lists)[name] for name in ARGUMENTS)
    return replace(op, target="autopar.padded_convolution.default", args=args, kwargs=())
