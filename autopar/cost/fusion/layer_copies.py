"""Copies of operands that products and convolutions need in another layout or with padding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from autopar.cost.fusion.fused_graph import FusedGraph
from autopar.cost.fusion.kernel import Access, Direction, FusedKernel
from autopar.cost.ops.kernel_shapes import group_padding, has_padded_channels, padded
from autopar.ir.graph import DTYPE_BYTES, Op
from autopar.ops.alignment import TENSOR_CORE_BYTES, is_aligned
from autopar.ops.registry import Operand
from autopar.sharding.fuse_linear import is_layer

MATMUL = "aten.matmul.default"
# Of cuDNN's kernel that pads channels: 216 us for 77 MB in 3 channels (resnet101, H100), 42 and 85 for 19 and 39 MB on
# an H200.
PADDING_SLOWDOWN = 2.4


def layer_copies(fused: FusedGraph) -> Iterator[FusedKernel]:
    """Copies of strided inputs and gradients, and of inputs whose rows are padded for tensor cores.

    Kernels that make an input write it in the layout that the layer needs; a copy is left where they cannot.
    """
    for op in filter(is_layer, fused.graph.ops):
        x, result = op.reads[0], op.outputs[0].name
        if has_unaligned_rows(x, fused) or (fused.is_strided(x) and fused.root(x) not in fused.copied_roots):
            yield copy("forward", op, x)
        if fused.stats.ops[op.name].gradients and fused.is_strided(x):
            yield copy("backward", op, x)
        if fused.stats.ops[op.name].gradients and is_read_strided(result, fused):
            yield copy("backward", op, result)


def product_copies(fused: FusedGraph) -> Iterator[FusedKernel]:
    """Copies of operands of batched products whose batch dims no single stride steps through."""
    for op in fused.graph.ops:
        if op.target == MATMUL:
            trained = bool(fused.stats.ops[op.name].gradients)
            for name in dict.fromkeys(op.reads[:2]):
                if fused.is_in_memory(name) and has_scattered_batch(fused.operands[name]):
                    yield copy("forward", op, name)
            if trained and is_transposed_later(op.outputs[0].name, fused):
                yield copy("backward", op, op.outputs[0].name)


def padded_images(fused: FusedGraph) -> Iterator[FusedKernel]:
    """Copies of convolutions' inputs with channels that are padded for tensor cores, once in each direction."""
    for op in fused.graph.ops:
        if has_padded_channels(op, fused.graph):
            image = op.reads[0]
            channels = fused.operands[image].shape[1]
            wide = padded(channels, TENSOR_CORE_BYTES // DTYPE_BYTES[op.outputs[0].dtype]) / channels
            reads = (Access(op.name, image, PADDING_SLOWDOWN),)
            writes = (Access(op.name, image, wide * (PADDING_SLOWDOWN + 1)),)  # zeros first
            yield FusedKernel("forward", (op.name,), reads, writes)
            if fused.stats.ops[op.name].gradients:
                yield FusedKernel("backward", (op.name,), reads, writes)


def padded_groups(fused: FusedGraph) -> Iterator[FusedKernel]:
    """Traffic of padding convolutions' groups, in excess of the kernels that run without padding too.

    A kernel pads the weight, and another one cuts its gradient. The kernel that makes the operand pads it; an operand
    that others read too is copied. The norm that reads the result cuts it, and saves what it has cut.

    Error: the backward is that of an operand made by a batch norm and a ReLU, which reads the padding four times: with
        the gradient and with the operand, for the norm's sums and for its gradient.
    """
    for op in fused.graph.ops:
        wide_in, wide_out = group_padding(op, fused.graph)
        if wide_in == wide_out == 1:
            continue
        x, weight, result = op.reads[0], op.reads[1], op.outputs[0].name
        is_copied = wide_in > 1 and (fused.is_in_memory(x) or len(fused.readers[x]) > 1)
        is_cut = wide_out > 1 and fused.root(result) in fused.saved
        wide_weight = Access(op.name, weight, wide_in * wide_out)
        reads = Access(op.name, weight), Access(op.name, x, is_copied), Access(op.name, result, wide_out - 1)
        writes = wide_weight, Access(op.name, x, wide_in - 1 + is_copied), Access(op.name, result, is_cut)
        yield FusedKernel("forward", (op.name,), reads, writes)
        if fused.stats.ops[op.name].gradients:
            reads = wide_weight, Access(op.name, x, 4 * (wide_in - 1))
            writes = Access(op.name, weight), Access(op.name, result, wide_out - 1)
            yield FusedKernel("backward", (op.name,), reads, writes)


def has_scattered_batch(value: Operand) -> bool:
    """Whether dims before the last two are more than one, and not equally spaced as one."""
    batch = [(size, step) for size, step in zip(value.shape[:-2], value.stride[:-2]) if size > 1]
    return any(step != size * inner for (_, step), (size, inner) in pairwise(batch))


def is_transposed_later(name: str, fused: FusedGraph) -> bool:
    """Whether all readers of a product see its batch dims in another order, so that its gradient arrives so."""
    seen = views(name, fused)
    return bool(seen) and all(fused.graph.producer[view].target == "aten.transpose.int" for view in seen)


def views(name: str, fused: FusedGraph) -> list[str]:
    """Views of a value."""
    return [op.outputs[0].name for op in fused.readers.get(name, ()) if not fused.stats.ops[op.name].moves_data]


def copy(direction: Direction, op: Op, name: str) -> FusedKernel:
    """The kernel that copies an operand, or a result's gradient, of a layer."""
    return FusedKernel(direction, (op.name,), (Access(op.name, name),), (Access(op.name, name),))


def has_unaligned_rows(name: str, fused: FusedGraph) -> bool:
    """Whether rows of a value do not begin at addresses from which tensor cores load."""
    value = fused.operands[name]
    return not is_aligned(value.shape[-1], value.dtype)


def is_read_strided(name: str, fused: FusedGraph) -> bool:
    """Whether all readers of a value are views whose last dim lies apart in memory: so does its gradient's."""
    seen = views(name, fused)
    return bool(seen) and len(seen) == len(fused.readers[name]) and all(map(fused.is_strided, seen))
