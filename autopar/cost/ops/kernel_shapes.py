"""Slowdown of library kernels by the shapes of their operands: tiles, alignment, and starts of tiles.

Constants are of bfloat16 kernels on H100 and H200 (docs/benchmarks.md, "Kernels and prices").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from autopar.cost.ops.op_stats import ATTENTION
from autopar.ir.graph import DTYPE_BYTES, Graph, Op
from autopar.ops.alignment import FULL_SPEED_BYTES, TENSOR_CORE_BYTES, is_aligned
from autopar.ops.padded_convolution import CONVOLUTIONS, group_widths
from autopar.ops.registry import named_arguments
from autopar.sharding.fuse_linear import LINEAR


def shape_slowdowns(op: Op, graph: Graph, compiled: bool = False) -> tuple[float, float]:
    """FLOPs whose time a kernel on a GPU takes, over the operation's FLOPs: of the forward, of the backward.

    Args:
        compiled: in code of torch.compile.
    """
    if op.target == ATTENTION:
        bound, shapes = named_arguments(op), graph.shapes
        query, key = (shapes[bound[name].name] for name in ("query", "key"))
        return FORWARD.padding(query[-2], key[-2], query[-1]), BACKWARD.padding(query[-2], key[-2], query[-1])
    if "conv" in op.target:
        return convolution_slowdowns(op, graph, compiled)
    slowdown = product_slowdown(op, graph)
    return slowdown, slowdown


def padded(size: int, multiple: int) -> int:
    """The smallest multiple that is at least ``size``."""
    return multiple * ceil(size / multiple)


# -- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Tiles of an attention kernel.

    Args:
        queries, keys: tokens of one tile.
        start: keys whose work takes as long as starting a row of tiles.
        width: head widths are padded to a multiple of this.
        softmax: head width whose products take as long as the exponentials.
    """

    queries: int
    keys: int
    start: int
    width: int = 64
    softmax: int = 64

    def padding(self, queries: int, keys: int, width: int) -> float:
        """FLOPs in products that would take a kernel's time, over the FLOPs of attention itself."""
        rows, columns = padded(queries, self.queries), padded(keys, self.keys) + self.start
        return rows * columns * (padded(width, self.width) + self.softmax) / (queries * keys * width)


# The best of tiles of 64 and 128 tokens, starts of 0 to 256 keys and softmaxes of 0 to 64, for the 16 bfloat16 points
# of each of h100-nvlink.toml and h200-nvlink.toml, and kernels of training steps with 5, 197 and 257 tokens. With 5
# tokens a kernel takes 6 times as long as without tiles.
FORWARD = Tiles(queries=128, keys=128, start=96)
BACKWARD = Tiles(queries=128, keys=64, start=64)


# -- products ------------------------------------------------------------------------------------------------------

# Products of batches with unaligned rows, against aligned ones. torch.compile pads linear layers: those with rows of
# 196 elements (mixer_b16_224, H100) take 87 to 161 us instead of 44.
UNALIGNED_SLOWDOWN, PADDED_SLOWDOWN = 4.0, 2.7
HALF_ALIGNED_SLOWDOWN = 1.1  # fitted to the step of vit_so400m_patch14_siglip_224, whose rows are of 4,304 elements
# Batched products of small matrices take the time of whole tiles and of their starts; fitted to the step of
# swin_base_patch4_window7_224 (49 tokens, head width 32). So do linear layers of few features. Those of talking heads,
# 8 by 8 features for 4.9 M rows (cait_s24_224), take 208 us forward and 490 backward, priced 228 and 456.
TILE_ROWS, TILE_DEPTH, TILE_START_DEPTH, LAYER_START_DEPTH = 64, 32, 128, 192


def product_slowdown(op: Op, graph: Graph) -> float:
    """Seconds of a matrix product over those of a large, aligned product of as many FLOPs; 1 for other operations."""
    result = op.outputs[0]
    if op.target == LINEAR:
        out_features, in_features = graph.shapes[op.reads[1]]
        if prod(result.shape[:-1]) < TILE_ROWS:
            return 1.0
        slowdown = alignment_slowdown((in_features, out_features), result.dtype, PADDED_SLOWDOWN)
        if min(in_features, out_features) >= TILE_ROWS:
            return slowdown
        tiles = tile_depth(in_features, LAYER_START_DEPTH) * padded(out_features, TILE_ROWS)
        return slowdown * tiles / (in_features * out_features)
    operands = [graph.shapes[name] for name in op.reads]
    if len(operands) != 2 or any(len(shape) < 3 for shape in (*operands, result.shape)):
        return 1.0
    rows, depth, columns = operands[0][-2], operands[0][-1], result.shape[-1]
    tiles = padded(rows, TILE_ROWS) * padded(columns, TILE_ROWS) * tile_depth(depth)
    return tiles / (rows * depth * columns) * alignment_slowdown((depth, columns), result.dtype, UNALIGNED_SLOWDOWN)


# A convolution of few channels pads them to 16 bytes. Its forward steps through 32 channels of one position of the
# window after another, its backward through all positions. Stems of resnet101 (H100), pit_b_224, davit_tiny and
# xcit_small_12_p16_224 (H200): 1,537, 601, 184 and 236 us forward, 883, 272, 91 and 139 backward.
STEM_CHANNELS, STEM_START_DEPTH, STEM_SLOWDOWNS = 32, 512, (1.2, 2.5)
# Groups of few channels are computed as dense tiles of several groups. For several filters a channel cuDNN has a
# generic kernel: 0.23 to 0.29 TFLOP/s backward on an H200 (pit_b_224), a depthwise convolution's rate by 30.
GENERIC_SLOWDOWN = 30.0


def has_padded_channels(op: Op, graph: Graph) -> bool:
    """Whether cuDNN pads channels of a convolution's input. Patches are products (`autopar.ops.patch_embed`)."""
    if "conv" not in op.target or DTYPE_BYTES[op.outputs[0].dtype] != 2:
        return False
    given, (_, channels, *_) = named_arguments(op), graph.shapes[op.reads[0]]
    is_patch = [*given["stride"]] == [*graph.shapes[op.reads[1]][2:]] and not any(given["padding"])
    return not is_patch and not is_aligned(round(channels * group_padding(op, graph)[0]), op.outputs[0].dtype)


def group_padding(op: Op, graph: Graph) -> tuple[float, float]:
    """Channels of an operation's operand and result over their own, where compiled code on a GPU pads groups.

    1 for all but the convolutions of `autopar.ops.padded_convolution`.
    """
    if op.target not in CONVOLUTIONS:
        return 1.0, 1.0
    weight, groups = graph.shapes[op.reads[1]], named_arguments(op)["groups"]
    wide_in, wide_out = group_widths(op, weight, groups)
    return wide_in / weight[1], wide_out * groups / weight[0]


def convolution_slowdowns(op: Op, graph: Graph, compiled: bool) -> tuple[float, float]:
    """Seconds of a convolution over those of a large one, dense or depthwise, of as many FLOPs."""
    out, channels, *window = graph.shapes[op.reads[1]]
    groups = named_arguments(op)["groups"]
    if groups > 1:
        wide_in, wide_out = group_padding(op, graph) if compiled else (1.0, 1.0)
        by_tiles = wide_in * wide_out * max(1.0, TILE_ROWS / (wide_in * channels))
        return (by_tiles, by_tiles) if channels > 1 else (1.0, GENERIC_SLOWDOWN if out > groups else 1.0)
    if not has_padded_channels(op, graph):
        return 1.0, 1.0
    positions, rows = prod(window), padded(out, TILE_ROWS) / out
    forward = STEM_CHANNELS * positions + STEM_START_DEPTH
    backward = padded(TENSOR_CORE_BYTES // DTYPE_BYTES[op.outputs[0].dtype] * positions, 2 * TILE_ROWS)
    first, second = (s * rows * n / (channels * positions) for s, n in zip(STEM_SLOWDOWNS, (forward, backward)))
    return first, second


def tile_depth(depth: int, start: int = TILE_START_DEPTH) -> int:
    """Depth of a product whose arithmetic takes as long as a tile's, with its start."""
    return padded(depth, TILE_DEPTH) + start


def alignment_slowdown(row_lengths: Sequence[int], dtype: str, unaligned: float) -> float:
    """Seconds of a product over those of an aligned product of as many FLOPs.

    Args:
        row_lengths: elements of the last dims of its operands and results.
        unaligned: the slowdown if tensor cores cannot load all rows.
    """
    if any(not is_aligned(length, dtype) for length in row_lengths):
        return unaligned
    return 1.0 if all(is_aligned(length, dtype, FULL_SPEED_BYTES) for length in row_lengths) else HALF_ALIGNED_SLOWDOWN
