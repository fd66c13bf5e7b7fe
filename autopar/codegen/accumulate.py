"""Which linear layers add their weight's gradient to its sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from autopar.codegen.overlap import is_layer, overlapped
from autopar.ir import Op, Program, Ref, unused_name
from autopar.operators import named_arguments

Sums = Callable[[str], Tensor | None]  # by a weight's name


def no_sums(name: str) -> None:
    """There is none."""


def accumulating(program: Program, sums: Sums) -> tuple[Program, Mapping[str, Tensor]]:
    """The program with `autopar.accumulating_linear` where it is possible, and the sums that it reads then, by name.

    That is where nothing else reads the weight, whose gradient has no other part then, what the layer reads has a
    gradient, and there is such a product. Layers beside collectives stay: they overlap with these instead.
    """
    if program.mode != "train":
        return program, {}
    readers = Counter(name for op in program.ops for name in op.reads)
    grows = {value.name for value in program.values if value.requires_grad}
    lone = {op.name for op in overlapped(program.ops, program.results) if is_layer(op)}
    taken = {*readers, *(value.name for value in program.values)}
    used: dict[str, Tensor] = {}

    def exchanged(op: Op) -> Op:
        if op.name not in lone or not is_layer(op):
            return op
        given = named_arguments(op)
        x, weight = given["input"], given["weight"]
        if not isinstance(x, Ref) or not isinstance(weight, Ref) or x.name not in grows:
            return op
        if readers[weight.name] > 1 or weight.name in program.results:
            return op
        total = sums(weight.name)
        products = torch.float32, getattr(torch, op.outputs[0].dtype)
        if total is None or total.dtype not in products or not total.is_contiguous():
            return op
        name = unused_name(f"{weight.name}.sum", taken)
        taken.add(name)
        used[name] = total
        args = (x, weight, given["bias"], Ref(name))
        return replace(op, target="autopar.accumulating_linear.default", args=args, kwargs=())

    return replace(program, ops=tuple(exchanged(op) for op in program.ops)), used
