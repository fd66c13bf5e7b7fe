"""Grouped convolutions whose groups are padded with zero channels to a power of two.

cuDNN has kernels for tensor cores only for groups of a power of two channels. For others it rearranges all channels: a
3 by 3 convolution of 128 images of 28 by 28 pixels takes 621 us for 240 channels in groups of 24, and 80 us for 256 in
groups of 32 (bfloat16, H200). torch.compile pads in the kernel that makes an operand, and cuts in those that read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.graph import DTYPE_BYTES, Op

torch.library.define(
    "autopar::padded_convolution",
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
)
CONVOLUTIONS = frozenset(f"aten.conv{dims}d.default" for dims in (1, 2, 3))
MAX_WIDTH = 256  # channels


def group_widths(op: Op, weight: Sequence[int], groups: int) -> tuple[int, int]:
    """Channels of each group of a convolution's operand and result on a CUDA device, with padding.

    Args:
        weight: shape of the weight.
    """
    widths = weight[1], weight[0] // groups
    return (power_of_two(widths[0]), power_of_two(widths[1])) if has_padded_groups(op, weight, groups) else widths


def has_padded_groups(op: Op, weight: Sequence[int], groups: int) -> bool:
    """Whether groups of a convolution that are no power of two wide are padded; arguments as of `group_widths`."""
    widths = weight[1], weight[0] // groups
    made = op.outputs[0]
    is_batched, is_low = len(made.shape) == len(weight), DTYPE_BYTES[made.dtype] == 2
    # Depthwise convolutions have kernels of their own.
    has_groups = op.target in CONVOLUTIONS and groups > 1 and min(widths) > 1
    return has_groups and is_batched and is_low and max(widths) <= MAX_WIDTH


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


@torch.library.impl("autopar::padded_convolution", "CompositeImplicitAutograd")
def padded_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The convolution of ``x`` [N, C, …] with ``weight`` [O, C/groups, …]: [N, O, …], laid out as without padding.

    The bias is added last: torch.compile adds it in the kernel that cuts the result.
    """
    dims, width = x.dim() - 2, weight.shape[0] // groups
    wide_in, wide_out = power_of_two(weight.shape[1]), power_of_two(width)
    weight = with_width(with_width(weight, 1, 1, wide_in), 0, groups, wide_out)
    x = with_width(x, 1, groups, wide_in)
    result = torch.convolution(x, weight, None, stride, padding, dilation, False, [0] * dims, groups)
    result = with_width(result, 1, groups, width)
    return result if bias is None else result + bias.unflatten(0, (-1, *[1] * dims))


def with_width(x: Tensor, dim: int, groups: int, width: int) -> Tensor:
    """The tensor with ``width`` channels in each group: zeros are appended to a group, or its last channels are cut.

    The layout stays, channels last or contiguous.

    Args:
        dim: of the channels, 0 or 1.
    """
    own = x.shape[dim] // groups
    if own == width:
        return x
    is_channels_last = x.stride(1) < x.stride(-1)
    if is_channels_last:  # in the order of memory, which torch would forget for more dims
        x, dim = x.movedim(1, -1), -dim % x.dim()
    x = x.unflatten(dim, (groups, own))
    after = (0, 0) * (x.dim() - dim - 2)
    x = x.narrow(dim + 1, 0, width) if width < own else F.pad(x, (*after, 0, width - own))
    x = x.flatten(dim, dim + 1)
    return x.movedim(-1, 1) if is_channels_last else x
