"""Async tensor parallelism: one operation replaces a linear layer and the collective of its input or output.

The fused operator (`autopar.ops.async_tp`) overlaps the collective with the layer's GEMMs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Op
from autopar.ops.registry import named_arguments
from autopar.sharding.fuse_linear import FusableLinear, find_fusable


def fuse_async_tp(ops: Sequence[Op], kept: Collection[str]) -> list[Op]:
    """The operations with fusable pairs of linear layer and collective replaced by operators of `autopar.ops.async_tp`.

    Args:
        kept: values that are also read outside ``ops``.
    """
    pairs = list(find_fusable(ops, kept))
    second = {(p.layer if p.first is p.collective else p.collective).name: fused_op(p) for p in pairs}
    first = {p.first.name for p in pairs}
    return [second.get(op.name, op) for op in ops if op.name not in first]


def fused_op(pair: FusableLinear) -> Op:
    """The fused operation of a layer and a collective; it takes the place of the later one."""
    given, collective = named_arguments(pair.layer), pair.collective
    layer_first = pair.first is pair.layer
    x: Any = given["input"] if layer_first else collective.args[0]
    axis_args: tuple[Any, ...] = collective.args[1:]
    if pair.operator == "all_gather_linear":
        # Its gradient is partial.
        axis_args = (*axis_args[:-1], *(ragged for _, ragged in collective.kwargs))
    elif pair.operator == "pipelined_all_gather_linear":
        axis_args = axis_args[2:-1]
    elif layer_first:
        axis_args = axis_args[2:]
    return replace(
        collective if layer_first else pair.layer,
        target=f"autopar.{pair.operator}.default",
        args=(x, given["weight"], given["bias"], *axis_args),
        kwargs=(),
    )
