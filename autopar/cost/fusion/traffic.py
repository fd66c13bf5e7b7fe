"""Memory traffic of fused kernels, divided among the operations that they compute.

Slowdowns are against a copy of as many bytes, of torch 2.11's kernels on an H100 (docs/benchmarks.md, "Kernels").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from autopar.cost.fusion.fused_graph import ROW_NORMS, SOFTMAX, SPATIAL_MEANS, is_external, is_strided
from autopar.cost.fusion.kernel import DIRECTIONS, Access, Direction, FusedKernel
from autopar.cost.ops.fused_cost import COLUMN_SUM_SLOWDOWN
from autopar.cost.ops.op_stats import FusedTraffic, GraphStats, Traffic
from autopar.cost.ops.unfused_attention import SOFTMAX_FLOPS, lane_padding
from autopar.ir.graph import DTYPE_BYTES, Graph, Op
from autopar.ops.registry import CHANNEL_NORMS

ACTIVATIONS = frozenset(f"aten.{name}.default" for name in ("silu", "sigmoid", "tanh", "mish"))
ACTIVATION_SLOWDOWN = 1.15  # arithmetic of exp that traffic does not hide
# Arithmetic on an element in float32 operations, at the rate of large products. erf takes 1.5 ps forward and 2.0 to 2.1
# backward on H100 and on H200, whose memory is 1.4 times as fast; SiLU after a batch norm 1.4 forward, and 1.9 and 2.1
# in the two passes of its backward, statistics of a batch norm 0.7 to 1.1 (efficientnet_b3, H200).
BATCH_NORM = "aten.batch_norm.default"
ELEMENT_FLOPS = {
    "aten.gelu.default": {"forward": 78.0, "backward": 106.0},
    "aten.silu.default": {"forward": 72.0, "backward": 104.0},
    BATCH_NORM: {"forward": 52.0, "backward": 0.0},
}
# One of two passes sums over rows. On an H100, 0.6 to 2.5 GB in resnet101 take 1.07 to 1.16 times as long as copies.
BATCH_NORM_SLOWDOWN = {"forward": 1.0, "backward": 1.15}
NORM_BACKWARD_SLOWDOWN = 1.3  # partial sums of blocks of rows for the weights' gradients, in the same kernel
TRANSPOSED_NORM_SLOWDOWN = 2.0  # rows of a norm or softmax whose elements lie apart
# A residual stream keeps the layout of the first value in its sums, such as that of a convolution's transposed result.
# Norms across it load 2 bytes of a sector at a time: 2.4 to 4.1 ps an element in gmixer_24_224 and cait_s24_224 (H100),
# 4.4 to 6.7 in xcit_small_12_p16_224 (H200); their backwards 8.1 to 9.5 and 6.4 to 7.9 ps.
ACROSS_FLOPS = {"forward": 240.0, "backward": 450.0}
UNCOALESCED_SLOWDOWN = 10.0  # of at most 16: a sector of 32 bytes for each element of 2 bytes
CAST = "aten.to.dtype"
SUM_KERNELS = 2  # of a sum over rows: partial sums of blocks of rows and their sum, or that and its cast


def fused_traffic(graph: Graph, stats: GraphStats, kernels: Iterable[FusedKernel]) -> Mapping[str, FusedTraffic]:
    """Traffic of each operation's part in fused kernels, by the operation's name."""
    moved: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    launches, sums, ops = Counter[tuple[str, str]](), Counter[tuple[str, str]](), {op.name: op for op in graph.ops}
    arithmetic: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for kernel in kernels:
        members = [ops[name] for name in kernel.ops]
        factor = slowdown(kernel, members, stats)
        for access, times in slowed_accesses(kernel, members, factor, graph, stats):
            op = ops[access.op]
            names = (*op.reads, *(v.name for v in op.outputs))
            moved[op.name, kernel.direction].append((names.index(access.tensor), times))
        if kernel.writes:
            launches[kernel.writes[0].op, kernel.direction] += 1
        for op in members:
            num_sums = norm_sums(op, kernel.direction, stats)
            launches[op.name, kernel.direction] += SUM_KERNELS * num_sums
            sums[op.name, kernel.direction] = num_sums if op.target in ROW_NORMS else 0
            if kernel.writes and (flops := element_flops(op, kernel.direction, graph, stats)):
                passes, num_bytes = arithmetic_passes(op, kernel, members, graph)
                elements = prod(graph.readable[op.outputs[0].name].shape)
                arithmetic[op.name, kernel.direction].append((passes * flops, factor * num_bytes / elements))
    for op, summed in weight_sums(graph, stats):
        moved[op.name, "backward"] += summed
        launches[op.name, "backward"] += SUM_KERNELS
    return {
        name: FusedTraffic(
            *(
                Traffic(tuple(sorted(moved[at])), launches[at], sums[at], tuple(arithmetic[at]))
                for at in ((name, direction) for direction in DIRECTIONS)
            )
        )
        for name in ops
    }


def slowed_accesses(
    kernel: FusedKernel, members: Sequence[Op], factor: float, graph: Graph, stats: GraphStats
) -> Iterator[tuple[Access, float]]:
    """Accesses of a kernel so much slower than a copy, each with the number of copies that take as long."""
    along_rows = not any(strided_bytes(op, graph, stats) for op in members)
    for access in kernel.accesses:
        own = access_slowdown(access, kernel, members) if along_rows else 1.0
        yield access, access.times * max(factor, own)


def strided_bytes(op: Op, graph: Graph, stats: GraphStats) -> int:
    """Bytes of an element, for a norm whose rows lie across memory that a generated kernel wrote; 0 for others."""
    if op.target not in ROW_NORMS:
        return 0
    name = op.reads[0]
    while (maker := graph.producer.get(name)) is not None and maker.target == CAST:
        name = maker.reads[0]
    if maker is None or is_external(maker, stats.ops[maker.name]) or not stats.ops[maker.name].moves_data:
        return 0
    made = stats.ops[maker.name].outputs[0]
    return DTYPE_BYTES[made.dtype] if is_strided(made) else 0


def element_flops(op: Op, direction: Direction, graph: Graph, stats: GraphStats) -> float:
    """Float32 operations that take the time of an element of an operation's result if its traffic does not."""
    if op.target in ELEMENT_FLOPS:
        return ELEMENT_FLOPS[op.target][direction]
    if num_bytes := strided_bytes(op, graph, stats):
        return ACROSS_FLOPS[direction] * 2 / num_bytes
    return SOFTMAX_FLOPS * lane_padding(op.outputs[0].shape[-1]) if op.target in SOFTMAX else 0.0


def arithmetic_passes(op: Op, kernel: FusedKernel, members: Sequence[Op], graph: Graph) -> tuple[int, float]:
    """Passes of a kernel in which it computes an operation or its gradient, and the bytes that they move.

    A norm over channels takes a pass for its statistics, or for sums over gradients, and another for values.
    """
    num_bytes = sum(access.times * graph.readable[access.tensor].num_bytes for access in kernel.accesses)
    first = sum(access.times / 2 * graph.readable[access.tensor].num_bytes for access in kernel.reads)
    norms = [i for i, member in enumerate(members) if member.target in CHANNEL_NORMS]
    if op.target == BATCH_NORM:
        return 1, first
    if not norms:
        return 1, num_bytes
    place = members.index(op)
    is_in_both = place < norms[-1] if kernel.direction == "forward" else place > norms[0]
    return (2, num_bytes) if is_in_both else (1, num_bytes - first)


def slowdown(kernel: FusedKernel, members: Sequence[Op], stats: GraphStats) -> float:
    """Seconds of a kernel over the seconds in which a copy moves its bytes."""
    factor, is_transposed = 1.0, any(access.is_transposed for access in kernel.reads)
    for op in members:
        made = stats.ops[op.name].outputs
        if op.target in ACTIVATIONS:
            factor = max(factor, ACTIVATION_SLOWDOWN)
        elif op.target == BATCH_NORM:
            factor = max(factor, BATCH_NORM_SLOWDOWN[kernel.direction])
        elif op.target in CHANNEL_NORMS | SPATIAL_MEANS:
            factor = max(factor, COLUMN_SUM_SLOWDOWN)
        elif op.target in SOFTMAX:
            apart = TRANSPOSED_NORM_SLOWDOWN if is_transposed else 1.0
            factor = max(factor, apart * ACTIVATION_SLOWDOWN)
        elif op.target in ROW_NORMS and kernel.direction == "backward":
            factor = max(factor, NORM_BACKWARD_SLOWDOWN * lane_padding(made[0].shape[-1]))
        elif op.target in ROW_NORMS and is_transposed:
            factor = max(factor, TRANSPOSED_NORM_SLOWDOWN)
    return factor


def access_slowdown(access: Access, kernel: FusedKernel, members: Sequence[Op]) -> float:
    """Slowdown of an access by its layout. Kernels without sums read and write tiles, in any order of dims."""
    sums_rows = any(op.target in ROW_NORMS for op in members)
    if not access.is_transposed or (sums_rows and kernel.direction == "forward" and access in kernel.reads):
        return 1.0
    is_library_copy = kernel.ops == (access.op,) and kernel.direction == "backward"
    return UNCOALESCED_SLOWDOWN if sums_rows or is_library_copy else 1.0


def norm_sums(op: Op, direction: Direction, stats: GraphStats) -> int:
    """Number of sums over rows that a norm takes in one direction: of statistics, or of its weights' gradients."""
    if op.target in CHANNEL_NORMS:
        return 1
    weights = [i for i in stats.ops[op.name].gradients if i > 0]
    return len(weights) if op.target in ROW_NORMS and direction == "backward" else 0


def weight_sums(graph: Graph, stats: GraphStats) -> Iterator[tuple[Op, list[tuple[int, float]]]]:
    """Fused operations whose backward sums over rows for a broadcast operand's gradient, with what the sum reads.

    Such operands are scales, biases and position embeddings. Norms sum for their weights in their own kernels.
    """
    for op in graph.ops:
        own = stats.ops[op.name]
        if is_external(op, own) or op.target in ROW_NORMS | CHANNEL_NORMS or not own.moves_data:
            continue
        sizes = [prod(graph.readable[name].shape) for name in op.reads]
        size = max((prod(made.shape) for made in own.outputs), default=0)
        if len(own.outputs) == 1 and any(sizes[i] < size for i in own.gradients):
            values = [i for i in own.saved_operands if sizes[i] == size]
            yield op, [(i, COLUMN_SUM_SLOWDOWN) for i in (*values, len(op.reads))]
