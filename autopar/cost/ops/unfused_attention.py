"""Seconds of attention without a fused kernel on a GPU: products in float32, and a softmax between them.

torch computes it so for queries of other than four dims (windows of twins_svt_base), for dropout and for float64.
Operands of lower precision are converted to float32.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost.ops.kernel_shapes import padded
from autopar.ir.graph import DTYPE_BYTES, Graph, Op
from autopar.ir.hardware import Hardware
from autopar.ops.registry import named_arguments

# Arithmetic of a softmax on an element that a thread holds, in float32 operations at the rate of large products: 4.0 to
# 4.6 ps forward and 5.3 to 6.0 backward in bfloat16 on an H100 for rows of 49 elements, of 64 that are held; 4.1 and
# 3.0 in float32 on an H200; 4.6 and 3.6 for rows of 196, of 256.
SOFTMAX_FLOPS = 180.0
# Tiles of batched float32 products, and the depth whose arithmetic takes as long as a tile's start: 32 to 41 us for
# 3,072 products of 49 by 49 by 32 on an H200 (twins_svt_base). With tiles of 64 the three steps of hiera_base_224, some
# of whose windows have 16 tokens, are priced 8 to 13 % too slow, with 32 3 % too fast.
TILE, START_DEPTH = 32, 40


def unfused_attention_seconds(
    op: Op, graph: Graph, flops: float, num_bytes: Callable[[str], float], hardware: Hardware
) -> tuple[float, float]:
    """Seconds of the forward and of the backward.

    Args:
        flops: of the forward's two products on this rank.
        num_bytes: bytes of a value on this rank, by name.
    """
    bound = named_arguments(op)  # several of them may be one value
    query, key, value = (graph.readable[bound[name].name] for name in ("query", "key", "value"))
    (rows, width), columns = query.shape[-2:], key.shape[-2]
    scores = flops / (4 * width)
    padding = padded(rows, TILE) * padded(columns, TILE) * (width + START_DEPTH) / (rows * columns * width)
    dtype = query.dtype if query.dtype == "float64" else "float32"
    size, wide = DTYPE_BYTES[dtype], DTYPE_BYTES[dtype] / DTYPE_BYTES[query.dtype]
    tokens = sum(num_bytes(v.name) for v in (query, key, value, op.outputs[0]))
    product = hardware.op_seconds("matmul", flops / 2 * padding, size * scores + wide * tokens / 2, dtype)
    converted = hardware.op_seconds("memory", 0.0, (1 + wide) * tokens, dtype) if wide > 1 else 0.0
    computing = scores * lane_padding(columns) * SOFTMAX_FLOPS / hardware.peak_flops[dtype]
    softmax = [max(computing, hardware.traffic_seconds(n * size * scores, 1)) for n in (2, 3)]
    return 2 * product + softmax[0] + converted, 4 * product + softmax[1] + converted


def lane_padding(row: int) -> float:
    """Elements of the threads that hold a row in registers, a power of two, over the row's."""
    return (1 << (row - 1).bit_length()) / row
