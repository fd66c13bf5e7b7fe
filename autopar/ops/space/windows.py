"""Convolutions and pools over a part of a picture: the windows of a rank's outputs, with rows of its neighbours.

Windows inside of the part read the part itself, so that autograd saves no second copy of it. Windows over a border read
a strip of a few rows: those of the neighbour, and the part's next to them. No output is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.space.halo import add_halo_gradients, halo_like, with_halo

MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}

WHERE = "int dim, int[] halo, int ranks, str axis"
torch.library.define(
    "autopar::halo_convolution",
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, "
    f"{WHERE}) -> Tensor",
)
torch.library.define(
    "autopar::halo_conv_transpose",
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, int[] dilation, "
    f"int groups, {WHERE}) -> Tensor",
)
torch.library.define(
    "autopar::halo_max_pool",
    f"(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode, {WHERE}) -> Tensor",
)
torch.library.define(
    "autopar::halo_avg_pool",
    f"(Tensor x, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, int? divisor, {WHERE}) -> Tensor",
)


def window_strips(size: int, before: int, span: int, stride: int) -> list[range]:
    """Strips of rows that the windows of a part read, numbered from the part's first row; one lies inside, if any does.

    Args:
        size: rows of the part, a multiple of ``stride``.
        before: rows before the part in which the first window begins.
        span: rows from the first to the last of a window.
    """
    outputs = size // stride
    first = -(-before // stride)  # of the windows inside of the part
    last = min((before + size - span) // stride, outputs - 1)
    ends = [(0, first - 1), (first, last), (last + 1, outputs - 1)] if first <= last else [(0, outputs - 1)]
    return [range(a * stride - before, b * stride - before + span) for a, b in ends if a <= b]


def over_windows(
    compute: Callable[[Tensor], Tensor], x: Tensor, dim: int, halo: HaloExchange, span: int, stride: int
) -> Tensor:
    """The outputs of all windows that begin at multiples of ``stride`` in a part that the rows before it extend.

    Args:
        compute: the outputs of the windows inside of a strip of rows, which is not padded in ``dim``.
        span: as of `window_strips`.
    """
    strips = window_strips(x.shape[dim], halo.rows[0], span, stride)
    return joined([compute(rows) for rows in _Strips.apply(x, dim, halo, strips)], dim)  # type: ignore[union-attr]


@dataclass(frozen=True)
class HaloExchange:
    """The rows before and after a part that it gets from its neighbours; arguments as of `halo_like`."""

    rows: Sequence[int]
    border: float
    ranks: int
    axis: str


class _Strips(torch.autograd.Function):
    """Strips of a part and its halo. Autograd's slices would each make a gradient of the part's size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, halo: HaloExchange, strips: list[range]) -> tuple[Tensor, ...]:
        ctx.where = dim, halo, strips, x.shape
        rows = halo_like(x, dim, halo.rows, halo.border, halo.ranks, halo.axis)
        size, before = x.shape[dim], halo.rows[0]

        def rows_of(strip: range) -> Tensor:
            begin, until = strip.start, strip.stop
            pieces = [
                rows.narrow(dim, begin + before, min(until, 0) - begin) if begin < 0 else None,
                x.narrow(dim, max(begin, 0), min(until, size) - max(begin, 0)),
                rows.narrow(dim, before, until - size) if until > size else None,
            ]
            return joined([piece for piece in pieces if piece is not None], dim)

        return tuple(map(rows_of, strips))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dim, halo, strips, shape = ctx.where
        size, before = shape[dim], halo.rows[0]
        whole = next((g for g, strip in zip(gradients, strips) if strip == range(size)), None)
        # Nothing else has the gradient of the strip inside: it is no view, and has one reader.
        total = gradients[0].new_zeros(shape) if whole is None else whole
        of_rows = gradients[0].new_zeros([sum(halo.rows) if i == dim else n for i, n in enumerate(shape)])
        for gradient, strip in zip(gradients, strips):
            begin, until = strip.start, strip.stop
            if gradient is whole:
                continue
            if begin < 0:
                of_rows.narrow(dim, begin + before, -begin).add_(gradient.narrow(dim, 0, -begin))
            if until > size:
                of_rows.narrow(dim, before, until - size).add_(gradient.narrow(dim, size - begin, until - size))
            inside = max(begin, 0), min(until, size) - max(begin, 0)
            total.narrow(dim, *inside).add_(gradient.narrow(dim, inside[0] - begin, inside[1]))
        add_halo_gradients(total, of_rows, dim, halo.rows, halo.ranks, halo.axis)
        return total, None, None, None


def joined(pieces: list[Tensor], dim: int) -> Tensor:
    """Pieces one after the other; a single one uncopied."""
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def unpadded(padding: list[int], x: Tensor, dim: int) -> list[int]:
    """The padding of the other dims; the rows next to a part take its place in the dim that is split."""
    spatial = dim - x.dim() + len(padding)
    return [0 if i == spatial else amount for i, amount in enumerate(padding)]


@torch.library.impl("autopar::halo_convolution", "CompositeImplicitAutograd")
def halo_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, dim: int, halo: list[int], ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """A rank's part of the convolution of a picture, of which ``x`` [N, C, …] is its part."""
    others, spatial = unpadded(padding, x, dim), dim - x.dim() + len(padding)

    def convolve(strip: Tensor) -> Tensor:
        return torch.convolution(strip, weight, bias, stride, others, dilation, False, [0] * len(padding), groups)

    span = dilation[spatial] * (weight.shape[spatial - len(padding)] - 1) + 1
    return over_windows(convolve, x, dim, HaloExchange(halo, 0.0, ranks, axis), span, stride[spatial])


@torch.library.impl("autopar::halo_conv_transpose", "CompositeImplicitAutograd")
def halo_conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], output_padding: list[int],
    dilation: list[int], groups: int, dim: int, halo: list[int], ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """A rank's part of a transposed convolution; as much padding more cuts off what the rows of neighbours make."""
    spatial = dim - x.dim() + len(padding)
    cut = [amount + (halo[0] * stride[i] if i == spatial else 0) for i, amount in enumerate(padding)]
    extended = with_halo(x, dim, halo, ranks, axis)
    return torch.convolution(extended, weight, bias, stride, cut, dilation, True, output_padding, groups)


@torch.library.impl("autopar::halo_max_pool", "CompositeImplicitAutograd")
def halo_max_pool(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool,
    dim: int, halo: list[int], ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """A rank's part of the maxima of windows of a picture."""
    others, spatial = unpadded(padding, x, dim), dim - x.dim() + len(padding)

    def pool(strip: Tensor) -> Tensor:
        return MAX_POOL[len(padding)](strip, kernel_size, stride, others, dilation, ceil_mode)

    span = dilation[spatial] * (kernel_size[spatial] - 1) + 1
    return over_windows(pool, x, dim, HaloExchange(halo, -torch.inf, ranks, axis), span, stride[spatial])


@torch.library.impl("autopar::halo_avg_pool", "CompositeImplicitAutograd")
def halo_avg_pool(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], ceil_mode: bool, divisor: int | None,
    dim: int, halo: list[int], ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """A rank's part of the means of windows of a picture, zeros beyond its border included."""
    others, spatial = unpadded(padding, x, dim), dim - x.dim() + len(padding)

    def pool(strip: Tensor) -> Tensor:
        options = {} if divisor is None else {"divisor_override": divisor}
        return AVG_POOL[len(padding)](strip, kernel_size, stride, others, ceil_mode, True, **options)

    return over_windows(pool, x, dim, HaloExchange(halo, 0.0, ranks, axis), kernel_size[spatial], stride[spatial])
