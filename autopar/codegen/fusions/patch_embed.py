"""Patch embedding: one GEMM (`autopar.ops.patch_embed`) replaces a convolution whose stride is its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from autopar.ir.graph import Op, Ref
from autopar.ir.program import Program
from autopar.ops.registry import for_each_dim, meta_tensor, named_arguments

FORMATS = {
    "aten.conv1d.default": torch.contiguous_format,
    "aten.conv2d.default": torch.channels_last,
    "aten.conv3d.default": torch.channels_last_3d,
}
CHANNEL_ALIGNMENT = 8  # channels


def use_patch_embed(program: Program) -> Program:
    """The program with a GEMM for each convolution of patches with few channels, and of single-position inputs."""
    shapes = program.shapes
    return replace(program, ops=tuple(as_product(op, shapes) for op in program.ops))


def as_product(op: Op, shapes: Mapping[str, Sequence[int]]) -> Op:
    """The GEMM that replaces a convolution; the operation itself if none does."""
    if op.target not in FORMATS:
        return op
    given, made = named_arguments(op), op.outputs[0]
    x, weight = given["input"], given["weight"]
    assert isinstance(x, Ref) and isinstance(weight, Ref), f"{op.name}: a convolution of constants"
    kernel = tuple(shapes[weight.name][2:])
    if len(made.shape) != 2 + len(kernel):  # a single sample without its dim
        return op
    channels, *sizes = shapes[x.name][1:]
    stride, padding, dilation = (for_each_dim(given[k], len(kernel)) for k in ("stride", "padding", "dilation"))
    if prod(kernel) > 1 and {*sizes, *made.shape[2:]} == {1}:
        taps = [divmod(p, d) for p, d in zip(padding, dilation)]
        if any(rest or tap >= size for (tap, rest), size in zip(taps, kernel)):  # padding alone
            return op
        args = (x, weight, given["bias"], [tap for tap, _ in taps], given["groups"])
        return replace(op, target="autopar.place_convolution.default", args=args, kwargs=())
    dense = not any(padding) and {*dilation} == {1} and given["groups"] == 1
    tiles = stride == kernel and not any(size % k for size, k in zip(sizes, kernel))
    if channels % CHANNEL_ALIGNMENT == 0 or prod(kernel) == 1 or not (dense and tiles):
        return op
    like = meta_tensor(made)
    rows = like.is_contiguous()
    if not rows and not like.is_contiguous(memory_format=FORMATS[op.target]):
        return op
    return replace(op, target="autopar.patch_convolution.default", args=(x, weight, given["bias"], not rows), kwargs=())
