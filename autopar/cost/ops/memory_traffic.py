"""Memory traffic beyond reading each operand and writing each result and gradient once.

A sum over samples is complete only after all samples have been read. An operation that needs such a sum reads the same
memory in a second pass, and so does one that sums along other dims than its kernel iterates over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autopar.cost.ops.op_stats import OpStats
from autopar.ir.graph import DTYPE_BYTES, Graph, Op
from autopar.ir.hardware import Hardware
from autopar.ops.alignment import is_aligned
from autopar.ops.padded_convolution import CONVOLUTIONS
from autopar.ops.registry import CHANNEL_NORMS, named_arguments
from autopar.sharding.exchanges import NORMS
from autopar.sharding.fuse_linear import is_layer

ALONG_ROWS = ("aten.layer_norm.default", "aten.rms_norm.default")


def forward_reread_bytes(op: Op, num_bytes: Callable[[str], float]) -> float:
    """Bytes that a forward reads a second time: the input of a norm that computes statistics first."""
    return num_bytes(op.reads[0]) if computes_statistics(op) else 0.0


def computes_statistics(op: Op) -> bool:
    """Whether an operation computes the statistics of whole channels or groups, then normalises by them."""
    if op.target in NORMS:
        return True
    if op.target not in CHANNEL_NORMS:
        return False
    given = named_arguments(op)
    return bool(given.get("training", True) and given.get("use_input_stats", True))


def backward_reread_bytes(op: Op, stats: OpStats, sums: bool, num_bytes: Callable[[str], float], on_gpu: bool) -> float:
    """Bytes that a backward reads a second time.

    Args:
        num_bytes: bytes of a value or weight on this rank, by name.
        sums: whether a gradient is a sum over samples that no GEMM computes, such as a bias's.
        on_gpu: on a GPU a layer norm's kernel iterates along rows, so that sums over rows take a second pass. On CPU
            each thread also adds its rows' contributions.
    Source: PyTorch's layer_norm_kernel.cu, batch_norm_kernel.cpp and Normalization.cuh. torch.compile also sums along
        other dims in separate kernels.
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
    """Bytes read and written to accumulate a microbatch's weight gradients into the main gradients.

    A GEMM that accumulates reads the main gradient at its end. Arithmetic of other tiles hides what it writes.

    Args:
        fused: weights whose wgrad GEMM accumulates into the main gradient.
        num_bytes: bytes of a value or weight on this rank, by name.
    Error: gradients of vectors are left out. Too high for a step's first microbatch, which reads no main gradient, and
        for plans with one microbatch and without replicas, stages and low-precision copies, which accumulate nothing.
    """
    moved = 0.0
    for name in (op.reads[i] for i in stats.gradients):
        weight = graph.weight.get(name)
        if weight is not None and len(weight.shape) > 1:
            elements = num_bytes(name) / DTYPE_BYTES[weight.dtype]
            stored = DTYPE_BYTES[weight.stored_dtype]
            moved += elements * (stored if name in fused else 2 * stored + DTYPE_BYTES[weight.dtype])
    return moved


def splittable_layers(graph: Graph) -> frozenset[str]:
    """Linear layers and convolutions whose trained weight has a single reader: a split backward leaves its gradient.

    Error: layers that are fused with a collective, and those that compiled programs replace by other kernels, are
        counted, though they stay whole (`autopar.codegen.fusions.split_backward`).
    """
    reads = Counter(name for op in graph.ops for name in op.reads)
    trained = {weight.name for weight in graph.weights if weight.requires_grad}
    layers = (op for op in graph.ops if is_layer(op) or op.target in CONVOLUTIONS)
    return frozenset(op.name for op in layers if op.reads[1] in trained and reads[op.reads[1]] == 1)


def fused_wgrad_weights(graph: Graph, hardware: Hardware) -> frozenset[str]:
    """Weights whose compiled linear layer accumulates into the main gradient: aligned ones with a single reader.

    Error: layers that are fused with a collective do not accumulate, but are counted here. Layers that do accumulate
        write no separate weight gradient, which is counted nevertheless.
    """
    if not hardware.execution_mode.compiled:
        return frozenset()
    reads = Counter(name for op in graph.ops for name in op.reads)
    layers = (op for op in graph.ops if is_layer(op) and graph.readable[op.reads[0]].requires_grad)
    weights = {op.reads[1]: op.outputs[0].dtype for op in layers if reads[op.reads[1]] == 1}
    shapes = graph.shapes
    return frozenset(name for name, low in weights.items() if all(is_aligned(size, low) for size in shapes[name]))
