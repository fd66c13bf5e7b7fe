"""Prices of the kernels that a plan's compiled code has between products, named as torch.compile names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.fusion.kernel import Direction, FusedKernel
from autopar.cost.fusion.traffic import element_flops, slowdown, slowed_accesses
from autopar.cost.ops.fused_cost import arithmetic_seconds
from autopar.cost.ops.op_cost import Pricing
from autopar.ir.graph import DTYPE_BYTES


@dataclass(frozen=True)
class PricedKernels:
    """Fused kernels of equal operations and sizes, and their summed price without pauses.

    Args:
        name: ``fused_add_layer_norm``: operations in alphabetical order.
        ops: of the first of them.
        num_bytes: that all of them read and write, each pass counted.
    """

    name: str
    direction: Direction
    ops: tuple[str, ...]
    count: int
    seconds: float
    num_bytes: int


def priced_kernels(pricing: Pricing, kernels: Sequence[FusedKernel]) -> tuple[PricedKernels, ...]:
    """Prices of fused kernels, the most expensive first.

    Args:
        pricing: of the graph whose kernels these are, as compiled code of a GPU.
    """
    hardware, ops = pricing.hardware, {op.name: op for op in pricing.graph.ops}
    start = hardware.traffic_seconds(hardware.memory_half_bytes)
    groups: dict[tuple, list[FusedKernel]] = {}
    seconds: dict[tuple, float] = {}
    for kernel in kernels:
        members = [ops[name] for name in kernel.ops]
        factor = slowdown(kernel, members, pricing.stats)
        slowed = slowed_accesses(kernel, members, factor, pricing.graph, pricing.stats)
        weighted = [(pricing.num_bytes(access.tensor), times) for access, times in slowed]
        copied = factor * sum(a.times * pricing.num_bytes(a.tensor) for a in kernel.accesses)
        flops = (
            element_flops(op, kernel.direction, pricing.graph, pricing.stats)
            * pricing.num_bytes(v.name)
            / DTYPE_BYTES[v.dtype]
            for op in members
            for v in op.outputs[:1]
        )
        arithmetic = sum(arithmetic_seconds(each, copied, hardware) for each in flops)
        key = kernel.direction, tuple(op.target for op in members), tuple(sorted(weighted))
        groups.setdefault(key, []).append(kernel)
        moving = hardware.traffic_seconds(sum(size * times for size, times in weighted))
        seconds[key] = start + moving + arithmetic
    rows = (
        PricedKernels(
            name="_".join(("fused", *sorted({target.split(".")[1] for target in key[1]}))),
            direction=key[0],
            ops=alike[0].ops,
            count=len(alike),
            seconds=len(alike) * seconds[key],
            num_bytes=len(alike) * round(sum(a.times * pricing.num_bytes(a.tensor) for a in alike[0].accesses)),
        )
        for key, alike in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))
