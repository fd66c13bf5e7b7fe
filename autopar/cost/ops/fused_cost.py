"""Seconds of an operation's part in kernels that torch.compile generates on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost.ops.op_stats import Traffic
from autopar.ir.graph import DTYPE_BYTES, Op
from autopar.ir.hardware import Hardware

# Sums over rows, whose elements lie apart: 19 to 137 us for 52 to 308 MB in docs/benchmarks/h100-x1-kernels-*.json.
COLUMN_SUM_SLOWDOWN = 1.25
# A kernel adds partial sums one after the other: 80, 394 and 514 in 2.2, 9.0 and 15.8 us. From 1,024 on blocks share
# them: 1,568 and 3,136 take 10 us. A split size of `autopar.codegen.compile` avoids numbers in between.
PARTIAL_SUM_SECONDS = 25e-9
MAX_PARTIAL_SUMS, ROWS_OF_PARTIAL_SUM = 400, 16


def fused_seconds(op: Op, traffic: Traffic, num_bytes: Callable[[str], float], hardware: Hardware) -> float:
    """Seconds of an operation's part in fused kernels of one direction.

    Args:
        num_bytes: bytes of a value or weight on this rank, by name.
    """
    names = (*op.reads, *(v.name for v in op.outputs))
    moved = sum(times * num_bytes(names[number]) for number, times in traffic.moved)
    seconds = hardware.traffic_seconds(moved) + traffic.kernels * small_kernel_seconds(hardware)
    if traffic.row_sums:
        result = op.outputs[0]
        rows = num_bytes(result.name) / (result.shape[-1] * DTYPE_BYTES[result.dtype])
        seconds += traffic.row_sums * PARTIAL_SUM_SECONDS * min(MAX_PARTIAL_SUMS, rows / ROWS_OF_PARTIAL_SUM)
    for flops, kernel_bytes in traffic.arithmetic:
        elements = num_bytes(op.outputs[0].name) / DTYPE_BYTES[op.outputs[0].dtype]
        seconds += elements * arithmetic_seconds(flops, kernel_bytes, hardware)
    return seconds


def arithmetic_seconds(flops: float, num_bytes: float, hardware: Hardware) -> float:
    """Seconds by which float32 arithmetic in a kernel outlasts the traffic of its bytes."""
    return max(0.0, flops / hardware.peak_flops["float32"] - hardware.traffic_seconds(num_bytes))


def column_sum_seconds(num_bytes: float, hardware: Hardware) -> float:
    """Seconds of a sum over rows of so many bytes: partial sums of blocks of rows, and a kernel that adds them."""
    return hardware.traffic_seconds(num_bytes * COLUMN_SUM_SLOWDOWN) + 2 * small_kernel_seconds(hardware)


def small_kernel_seconds(hardware: Hardware) -> float:
    """Seconds of a kernel that moves next to nothing."""
    return hardware.traffic_seconds(hardware.memory_half_bytes) + hardware.launch_seconds
