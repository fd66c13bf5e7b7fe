"""Machine-independent statistics of each operation: FLOPs, tensors saved for backward, outputs that are views.

Every distinct operation runs once, forward and backward, on meta tensors. torch's kernels tell what they save, and
torch's formulas how many FLOPs they compute, so that no operation needs an entry here. The exceptions are attention and
the FLOPs of a convolution's backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import TraceError
from autopar.ir.graph import DTYPE_BYTES, Graph, Op, Ref, dense_strides, memory_order
from autopar.ops.registry import Operand, meta_tensor, named_arguments, operand_from, operand_of, results_of, signature

ATTENTION = "aten.scaled_dot_product_attention.default"
MASK_ALIGNMENT = 8  # elements


@dataclass(frozen=True)
class OpStats:
    """Statistics of one operation at the traced shapes. Operands are numbered as in ``Op.reads``, outputs as in
    ``Op.outputs``.

    ``moves_data`` is false for views, which cost nothing. ``gradients`` are the operands for which the backward writes
    a new tensor; a gradient that is passed through, as an addition's, is not among them. ``aliases`` are pairs
    (output, operand) that share memory. Saved operands and outputs stay alive from forward to backward, and so do
    ``saved_bytes`` of memory that is neither.
    """

    forward_flops: int
    backward_flops: int
    moves_data: bool
    gradients: tuple[int, ...]
    saved_operands: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    saved_bytes: int
    aliases: tuple[tuple[int, int], ...]
    outputs: tuple[Operand, ...]

    def saved_names(self, op: Op) -> list[str]:
        """Names of the operands and outputs that ``op`` saves for its backward."""
        return [op.reads[i] for i in self.saved_operands] + [op.outputs[j].name for j in self.saved_outputs]


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of an operation's part in fused kernels of one direction.

    Args:
        moved: (number, times): the operation's tensor of that number, in ``Op.reads`` followed by ``Op.outputs``, or
            its gradient, moved so many times.
        kernels: number of kernels that are counted for this operation.
        row_sums: number of sums over rows that some of these kernels complete from partial sums of blocks of rows.
        arithmetic: of each kernel with arithmetic that may take longer than its traffic: float32 operations for an
            element of the operation's result, and the bytes of that traffic.
    """

    moved: tuple[tuple[int, float], ...] = ()
    kernels: int = 0
    row_sums: int = 0
    arithmetic: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class FusedTraffic:
    """Memory traffic of an operation's part in fused kernels."""

    forward: Traffic = Traffic()
    backward: Traffic = Traffic()


@dataclass(frozen=True)
class GraphStats:
    """Statistics of every operation of one graph, by the operation's name.

    ``traffic`` is that of the operations that share kernels with others, where regions are compiled.
    """

    ops: Mapping[str, OpStats]
    traffic: Mapping[str, FusedTraffic] = field(default_factory=dict)


def graph_stats(graph: Graph, device_type: str = "cpu") -> GraphStats:
    """Statistics of every operation of a graph, as a device of this type runs it.

    Strides and requires_grad are propagated from operation to operation instead of read from the trace. Real attention
    kernels lay out their output like their query; meta tensors do not. Whether the reshape after attention copies
    depends on that. And torch itself decides which operations it differentiates.

    Raises:
        TraceError: torch cannot run an operation on meta tensors; the message holds file and line in the user's model.
    """
    operands = {value.name: operand_of(value) for value in (*graph.inputs, *(w.value for w in graph.weights))}
    by_signature: dict[str, OpStats] = {}
    ops: dict[str, OpStats] = {}
    for op in graph.ops:
        read = tuple(operands[name] for name in op.reads)
        key = signature(op, read)
        if key not in by_signature:
            by_signature[key] = op_stats(op, read, device_type)
        ops[op.name] = by_signature[key]
        operands |= {value.name: made for value, made in zip(op.outputs, by_signature[key].outputs)}
    return GraphStats(ops)


def storage_names(graph: Graph, stats: GraphStats) -> Mapping[str, str]:
    """Name of the value, input or weight whose memory each view shares, by the view's name."""
    root: dict[str, str] = {}
    for op in graph.ops:
        for output, operand in stats.ops[op.name].aliases:
            source = op.reads[operand]
            root[op.outputs[output].name] = root.get(source, source)
    return root


def op_stats(op: Op, read: tuple[Operand, ...], device_type: str) -> OpStats:
    """Statistics of one operation.

    Raises:
        TraceError: torch cannot run it on meta tensors.
    """
    if op.target == ATTENTION and has_fused_kernel(op, read, device_type):
        return attention_stats(op, read, device_type)
    try:
        return run_on_meta(op, read)
    except RuntimeError as error:  # NotImplementedError is one
        shapes = ", ".join(f"{o.dtype}{list(o.shape)}" for o in read)
        raise TraceError(
            f"Cannot price {op.name} ({op.target} of {shapes}) at {op.source or 'an unknown line'}: torch cannot run "
            f"it on meta tensors: {str(error).splitlines()[0]}. Register a meta kernel for it or use other operations."
        ) from error


# -- any operation -----------------------------------------------------------------------------------------------


def run_on_meta(op: Op, read: tuple[Operand, ...]) -> OpStats:
    """Statistics from one forward and backward on meta tensors."""
    leaves = tuple(meta_tensor(o) for o in read)
    in_place = not op.outputs
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad():
        # autograd refuses to write into a leaf
        tensors = tuple(t.clone() if in_place and t.requires_grad else t for t in leaves)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), FlopCounterMode(display=False) as forward:
            results = results_of(op, tensors)
    assert in_place or len(results) == len(op.outputs), f"{op.name} returned {len(results)} tensors"
    gradients, backward_flops = run_backward(results, leaves)
    operand_memory, result_memory, kept_memory = map(storages, (tensors, results, saved))
    aliases = [(j, i) for j, m in enumerate(result_memory) for i in indices_in(operand_memory, [m])[:1]]
    saved_results = indices_in(result_memory, kept_memory)
    fresh = {id(m): m.nbytes() for m in kept_memory if not is_among(m, [*operand_memory, *result_memory])}
    return OpStats(
        forward_flops=forward.get_total_flops(),
        backward_flops=backward_flops,
        moves_data=in_place or len(aliases) < len(results),
        gradients=gradients,
        saved_operands=indices_in(operand_memory, kept_memory),
        saved_outputs=tuple(j for j in saved_results if not is_among(result_memory[j], operand_memory)),
        saved_bytes=sum(fresh.values()),
        aliases=() if in_place else tuple(aliases),
        outputs=() if in_place else tuple(in_format(op, read, operand_from(result)) for result in results),
    )


def in_format(op: Op, read: tuple[Operand, ...], made: Operand) -> Operand:
    """A result as real devices lay it out: a convolution on the meta device forgets that it read channels last."""
    if "conv" not in op.target:
        return made
    image = read[0]
    order = memory_order(image.shape, image.stride)
    is_same_layout = len(image.shape) != len(made.shape) or order[-1] != 1 or prod(image.shape[2:]) == 1
    return made if is_same_layout else replace(made, stride=dense_strides(made.shape, order))


def run_backward(results: list[Tensor], leaves: tuple[Tensor, ...]) -> tuple[tuple[int, ...], int]:
    """Indices of the operands whose gradient is a new tensor, and the backward's FLOPs."""
    roots = [t for t in results if t.requires_grad]
    trained = [i for i, t in enumerate(leaves) if t.requires_grad]
    if not roots or not trained:
        return (), 0
    arriving = [torch.ones_like(t) for t in roots]
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as backward:
        computed = torch.autograd.grad(roots, [leaves[i] for i in trained], arriving, allow_unused=True)
    passed_on = storages(arriving)
    fresh = (i for i, g in zip(trained, computed) if g is not None and not is_among(g.untyped_storage(), passed_on))
    return tuple(fresh), backward.get_total_flops()


def convolution_backward_flops(
    gradient: Sequence[int],
    operand: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
    out_shape: object = None,
) -> int:
    """FLOPs of a convolution's backward: as many as the forward for the input's gradient, and again for the weight's.

    torch's formula (2.11 to 2.15) counts the weight's gradient ``groups`` times. For a depthwise convolution of 512
    channels its result is 257 times too high.
    """
    pixels = (operand if transposed else gradient)[2:]
    return 2 * operand[0] * prod(pixels) * prod(weight) * sum(wanted[:2])


FORMULAS = {torch.ops.aten.convolution_backward: convolution_backward_flops}


# -- memory ------------------------------------------------------------------------------------------------------


def storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Storage of each tensor."""
    return [t.untyped_storage() for t in tensors]


def is_among(memory: torch.UntypedStorage, others: Sequence[torch.UntypedStorage]) -> bool:
    """Whether a storage is among others; compared by identity, since meta storages have no address."""
    return any(memory is other for other in others)


def indices_in(memories: Sequence[torch.UntypedStorage], others: Sequence[torch.UntypedStorage]) -> tuple[int, ...]:
    """Indices of the storages that are among others."""
    return tuple(i for i, memory in enumerate(memories) if is_among(memory, others))


# -- attention ---------------------------------------------------------------------------------------------------


def has_fused_kernel(op: Op, read: tuple[Operand, ...], device_type: str) -> bool:
    """Whether a device runs this attention in one kernel that never stores the attention matrix.

    torch falls back to separate operations, which the meta run reproduces, for three-dimensional queries and for
    dropout. On CPU it also falls back for a mask that needs a gradient, on a GPU for float64.
    """
    mask = mask_index(op)
    if (read[0].dtype == "float64") if device_type == "cuda" else (mask is not None and read[mask].requires_grad):
        return False
    return len(read[0].shape) == 4 and not named_arguments(op)["dropout_p"]


def mask_index(op: Op) -> int | None:
    """Index in ``op.reads`` of an attention's mask; None without a mask."""
    mask = named_arguments(op)["attn_mask"]
    return op.reads.index(mask.name) if isinstance(mask, Ref) else None


def attention_stats(op: Op, read: tuple[Operand, ...], device_type: str) -> OpStats:
    """Statistics of attention in one fused kernel, such as flash attention.

    Meta tensors take the path of separate operations, which saves the attention matrix. Fused kernels save query, key,
    value, output and one log-sum-exp per query, and recompute the matrix in their backward: five matmuls instead of the
    forward's two, hence 2.5 times its FLOPs. If the rows of a mask are not aligned as a GPU's kernel needs them, a copy
    with padded rows is saved in place of the mask.

    Source: Dao et al. 2022, FlashAttention, algorithm 4; the convention of torch.utils.flop_counter.
    """
    bound = named_arguments(op)
    query, key, value = (read[op.reads.index(bound[n].name)] for n in ("query", "key", "value"))
    flops = 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    trained = any(o.requires_grad for o in read)
    shape = (*query.shape[:-1], value.shape[-1])
    mask = mask_index(op)
    copied = 0 if mask is None or device_type == "cpu" else copied_mask_bytes(read[mask], query)
    saved = tuple(i for i in range(len(read)) if i != mask or not copied)
    return OpStats(
        forward_flops=flops,
        backward_flops=flops * 5 // 2 if trained else 0,
        moves_data=True,
        gradients=tuple(i for i, o in enumerate(read) if o.requires_grad) if trained else (),
        saved_operands=saved if trained else (),
        saved_outputs=(0,) if trained else (),
        saved_bytes=4 * prod(query.shape[:-1]) + copied if trained else 0,
        aliases=(),
        outputs=(Operand(shape, query.dtype, dense_strides(shape, memory_order(query.shape, query.stride)), trained),),
    )


def copied_mask_bytes(mask: Operand, query: Operand) -> int:
    """Bytes of the copy that a GPU's kernel reads instead of a mask; 0 if it reads the mask itself.

    In the copy, rows begin at multiples of `MASK_ALIGNMENT` elements, and booleans become the query's dtype.

    Source: preprocess_mask and convert_boolean_attn_mask in torch's aten/src/ATen/native/transformers/attention.cpp.
    """
    aligned = mask.stride[-1] == 1 and not any(stride % MASK_ALIGNMENT for stride in mask.stride[:-1])
    if aligned and mask.dtype != "bool":
        return 0
    row = mask.shape[-1]
    length = row if aligned else (row // MASK_ALIGNMENT + 1) * MASK_ALIGNMENT
    return prod(mask.shape[:-1]) * length * DTYPE_BYTES[query.dtype]
