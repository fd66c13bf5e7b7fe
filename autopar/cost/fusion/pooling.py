"""Kernels of pooling by windows, which read an element once for each window that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import Any

from autopar.cost.fusion.fused_graph import MAX_POOL, POOLS, FusedGraph
from autopar.cost.fusion.kernel import Access, FusedKernel
from autopar.ops.registry import named_arguments

OFFSET_FACTOR = 1.5  # a maximum's gradient in two bytes, and its offset in the window in one


def pooling_kernels(fused: FusedGraph) -> Iterator[FusedKernel]:
    """A kernel for each pooling, and one for its backward, which gathers from all windows that may hold an element.

    Error: caches are not counted, nor comparisons of offsets. The max pooling of ResNet (windows of 3 by 3, stride 2,
        256 images, H100) takes 371 us forward, priced 340, and 1,456 us backward, priced 950.
    """
    for op in fused.graph.ops:
        if op.target in POOLS:
            x, result = op.reads[0], op.outputs[0].name
            given = named_arguments(op)
            window = pair(given["kernel_size"])
            stride = pair(given["stride"] or window)
            loads = prod(window) / prod(stride)
            yield FusedKernel("forward", (op.name,), (Access(op.name, x, loads),), (Access(op.name, result),))
            if fused.stats.ops[op.name].gradients:
                gathered = prod(ceil(k / s) * s for k, s in zip(window, stride))
                gathered *= OFFSET_FACTOR if op.target == MAX_POOL else 1
                yield FusedKernel("backward", (op.name,), (Access(op.name, result, gathered),), (Access(op.name, x),))


def pair(size: Any) -> tuple[int, int]:
    """Height and width of a window or stride, which may be given as one number."""
    listed = [size] if isinstance(size, int) else list(size)
    return listed[0], listed[-1]
