"""What operations read and write beyond each operand, result and gradient once.

A sum over samples is known when all of them have been read: what needs it, or is summed along other dims than a kernel
goes, takes a pass of its own over the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autopar.cost.ops.op_stats import OpStats
from autopar.ir.graph import DTYPE_BYTES, Graph, Op
from autopar.ir.hardware import Hardware
from autopar.ops.registry import named_arguments
from autopar.sharding.fuse_linear import is_layer

# Normalised over more than fits beside a kernel: statistics first, then values. The backward likewise.
ACROSS_SAMPLES = ("aten.batch_norm.default", "aten.instance_norm.default", "aten.group_norm.default")
ALONG_ROWS = ("aten.layer_norm.default", "aten.rms_norm.default")


def forward_reread_bytes(op: Op, num_bytes: Callable[[str], float]) -> float:
    """What a forward reads again, byte: a norm what its statistics were taken of."""
    return num_bytes(op.reads[0]) if computes_statistics(op) else 0.0


def computes_statistics(op: Op) -> bool:
    """Whether it normalises by statistics of a whole channel or group, taken now."""
    if op.target not in ACROSS_SAMPLES:
        return False
    given = named_arguments(op)
    return bool(given.get("training", True) and given.get("use_input_stats", True))


def backward_reread_bytes(op: Op, stats: OpStats, sums: bool, num_bytes: Callable[[str], float], on_gpu: bool) -> float:
    """What a backward reads again, byte.

    Args:
        sums: whether some gradient is a sum over samples that no product of matrices makes, as a bias has.
        on_gpu: where a kernel of a layer norm goes along rows; on CPU each thread also sums what its rows give.
    Source: PyTorch's layer_norm_kernel.cu, batch_norm_kernel.cpp and Normalization.cuh; torch.compile, too, sums along
        other dims in kernels of their own.
    """
    arriving = sum(num_bytes(v.name) for v in op.outputs if v.requires_grad)
    if op.target in ALONG_ROWS:
        return arriving + num_bytes(op.reads[0]) if sums and on_gpu else 0.0
    if computes_statistics(op):
        return arriving + num_bytes(op.reads[0]) if stats.gradients else 0.0
    return arriving if sums else 0.0


def grad_accumulation_bytes(
    op: Op, stats: OpStats, graph: Graph, fused: frozenset[str], num_bytes: Callable[[str], float]
) -> float:
    """What adding a microbatch's gradients of weights to the step's sums reads and writes, byte.

    Args:
        added: weights whose sums the product itself adds to.
    Error: those of vectors are left out. A step's first microbatch reads no sums, and without replicas, stages or
        low-precision copies gradients stay where they come, so that one microbatch adds nothing.
    """
    moved = 0.0
    for name in (op.reads[i] for i in stats.gradients):
        weight = graph.weight.get(name)
        if weight is not None and len(weight.shape) > 1:
            elements = num_bytes(name) / DTYPE_BYTES[weight.dtype]
            read = 0 if name in fused else DTYPE_BYTES[weight.dtype]
            moved += elements * (2 * DTYPE_BYTES[weight.stored_dtype] + read)
    return moved


def fused_wgrad_weights(graph: Graph, hardware: Hardware) -> frozenset[str]:
    """Weights to whose gradients compiled linear layers add: those that nothing else reads.

    Error: layers that are one operation with a collective do not, and those that do write no gradient of their own.
    """
    if not hardware.execution_mode.compiled:
        return frozenset()
    reads = Counter(name for op in graph.ops for name in op.reads)
    layers = (op for op in graph.ops if is_layer(op) and graph.readable[op.reads[0]].requires_grad)
    return frozenset(op.reads[1] for op in layers if reads[op.reads[1]] == 1)
