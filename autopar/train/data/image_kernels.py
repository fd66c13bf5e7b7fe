"""Triton kernels that make batches of images: Pillow's resize and colour changes, timm's flips, normalisation, erasing.

Few kernels for whole batches, since each one waits until a training step's kernels leave room. Results equal Pillow's
to the last bit (10.4 to 13.0): its resize (Resample.c of Pillow) sums products with whole weights and rounds after each
direction; its colour changes (Blend.c) are float32. So products and sums must not be fused.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# (Triton declares no types of what kernels compute with.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.train.data.device_samples import CONTRAST, SATURATION

WEIGHT_BITS = tl.constexpr(22)  # of Pillow's whole weights
ONE, HALF = tl.constexpr(1 << 22), tl.constexpr(1 << 21)
ROWS, PIXELS = 8, 1024  # of a program
# Columns of the table of images, int64: of the crop, and of the image that it is resized to, height and width; row and
# column of the result in that; whether the resize is bicubic; the crop's address; bytes from one row, pixel and channel
# to the next; flip; kinds of three colour changes; top, left, height, width of the erased box; turned; rows of
# the crops before it; most pixels that one of its result reads. Crop and levels of a turned image are transposed, since
# Pillow resizes its height first.
COLUMNS = tl.constexpr(22)
RESIZED, FIRST, CUBIC, ADDRESS, STRIDES, FLIP, KINDS, ERASED, TURNED, BEFORE, TAPS = (
    tl.constexpr(n) for n in (2, 4, 6, 7, 8, 11, 12, 15, 19, 20, 21)
)
IS_CONTRAST, IS_SATURATION = tl.constexpr(CONTRAST), tl.constexpr(SATURATION)


@triton.jit
def filtered(x, cubic):
    """Pillow's filter at distances from an output pixel, float64."""
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    bicubic = tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(cubic, bicubic, tl.where(x < 1.0, 1.0 - x, 0.0))


@triton.jit(do_not_specialize=["taps"])
def weights_kernel(table, starts, weights, side, taps, width: tl.constexpr):
    """Write the first pixel that each output pixel reads, [side], and weights [taps, side], for one direction."""
    image, axis = tl.program_id(0), tl.program_id(1)
    row = table + image * COLUMNS + axis
    cubic, size = tl.load(table + image * COLUMNS + CUBIC) != 0, tl.load(row)
    at = tl.arange(0, width)
    scale = size.to(tl.float64) / tl.load(row + RESIZED).to(tl.float64)
    stretch = tl.maximum(scale, 1.0)
    support = stretch * tl.where(cubic, 2.0, 1.0).to(tl.float64)
    centre = ((at + tl.load(row + FIRST)).to(tl.float64) + 0.5) * scale
    start = tl.maximum((centre - support + 0.5).to(tl.int64), 0)
    count = tl.minimum((centre + support + 0.5).to(tl.int64), size) - start
    narrow = 1.0 / stretch
    total = tl.zeros((width,), tl.float64)
    own = tl.load(table + image * COLUMNS + TAPS).to(tl.int32)
    for tap in range(own):
        weight = filtered(((start + tap).to(tl.float64) - centre + 0.5) * narrow, cubic)
        total += tl.where(tap < count, weight, 0.0)
    result = weights + (image * 2 + axis) * taps * side + at
    for tap in range(own):
        weight = filtered(((start + tap).to(tl.float64) - centre + 0.5) * narrow, cubic)
        weight = tl.where(tap < count, weight / total, 0.0) * ONE  # 0 of an empty crop, which Pillow makes black
        whole = (weight + tl.where(weight < 0, -0.5, 0.5)).to(tl.int32)
        tl.store(result + tap * side, whole, mask=at < side)
    tl.store(starts + (image * 2 + axis) * side + at, start.to(tl.int32), mask=at < side)


@triton.jit
def level(total):
    """Whole levels of sums of products."""
    return tl.minimum(tl.maximum(total >> WEIGHT_BITS, 0), 255).to(tl.uint8)


@triton.jit(do_not_specialize=["taps"])  # in which batches differ
def widths_kernel(
    table, starts, weights, result, side, taps, channels: tl.constexpr, rows: tl.constexpr, width: tl.constexpr
):
    """Some rows of a crop resized horizontally, uint8 [channels, its height, side] after those of the crops before."""
    image, y, x = tl.program_id(0), tl.program_id(1) * rows + tl.arange(0, rows), tl.arange(0, width)
    row = table + image * COLUMNS
    if tl.program_id(1) * rows >= tl.load(row):  # of the highest crop alone
        return
    source = tl.load(row + ADDRESS).to(tl.pointer_type(tl.uint8))
    lines = source + (y * tl.load(row + STRIDES))[:, None]
    step, height, own = tl.load(row + STRIDES + 1), tl.load(row), tl.load(row + TAPS).to(tl.int32)
    inside, before = y < height, tl.load(row + BEFORE) * channels
    first = tl.load(starts + (image * 2 + 1) * side + x, mask=x < side, other=0)
    for channel in tl.static_range(channels):
        total = tl.full((rows, width), HALF, tl.int32)
        for tap in range(own):
            weight = tl.load(weights + ((image * 2 + 1) * taps + tap) * side + x, mask=x < side, other=0)
            pixels = lines + channel * tl.load(row + STRIDES + 2) + ((first + tap) * step)[None, :]
            levels = tl.load(pixels, mask=inside[:, None] & (weight != 0)[None, :], other=0)
            total += levels.to(tl.int32) * weight[None, :]
        to = result + (before + channel * height + y)[:, None] * side + x[None, :]
        tl.store(to, level(total), mask=inside[:, None] & (x < side)[None, :])


@triton.jit(do_not_specialize=["taps"])
def heights_kernel(
    table, starts, weights, lines, result, side, taps, channels: tl.constexpr, rows: tl.constexpr, width: tl.constexpr
):
    """Some rows of a result, of rows [channels, height, side], uint8 [channels, side, side]."""
    row = table + tl.program_id(0) * COLUMNS
    height, before, own = tl.load(row), tl.load(row + BEFORE) * channels, tl.load(row + TAPS).to(tl.int32)
    image, y, x = tl.program_id(0), tl.program_id(1) * rows + tl.arange(0, rows), tl.arange(0, width)
    inside = (y < side)[:, None] & (x < side)[None, :]
    first = tl.load(starts + image * 2 * side + y, mask=y < side, other=0)
    for channel in tl.static_range(channels):
        total = tl.full((rows, width), HALF, tl.int32)
        for tap in range(own):
            weight = tl.load(weights + (image * 2 * taps + tap) * side + y, mask=y < side, other=0)
            pixels = lines + (before + channel * height + first + tap)[:, None] * side
            levels = tl.load(pixels + x[None, :], mask=inside & (weight != 0)[:, None], other=0)
            total += levels.to(tl.int32) * weight[:, None]
        to = result + ((image * channels + channel) * side + y).to(tl.int64)[:, None] * side + x[None, :]
        tl.store(to, level(total), mask=inside)


@triton.jit
def grey_level(red, green, blue):
    """Levels in Pillow's mode L."""
    return (red * 19595 + green * 38470 + blue * 7471 + (1 << 15)) >> 16


@triton.jit
def blended(levels, other, factor):
    """Levels moved away from others, or towards them if the factor is below 1."""
    start = other.to(tl.float32)
    moved = (levels.to(tl.float32) - start) * factor + start
    return tl.minimum(tl.maximum(moved, 0.0), 255.0).to(tl.int32)


@triton.jit
def changed(red, green, blue, kind, factor, mean):
    """Levels after one colour change; ``mean`` is the image's mean grey level before a change of contrast."""
    grey = grey_level(red, green, blue)
    other = tl.where(kind == IS_CONTRAST, mean, tl.where(kind == IS_SATURATION, grey, 0))
    factor = tl.where(kind < 0, 1.0, factor)  # then whole levels stay
    return blended(red, other, factor), blended(green, other, factor), blended(blue, other, factor)


@triton.jit
def colours(levels, pixels, at, inside, channels: tl.constexpr):
    """Levels of pixels in each channel; of the only one three times."""
    red = tl.load(levels + at, mask=inside, other=0).to(tl.int32)
    green = tl.load(levels + (channels > 1) * pixels + at, mask=inside, other=0).to(tl.int32)
    blue = tl.load(levels + (channels > 1) * 2 * pixels + at, mask=inside, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def means_kernel(table, factors, levels, means, pixels, channels: tl.constexpr, block: tl.constexpr):
    """Mean grey level of an image before its contrast changes."""
    image = tl.program_id(0)
    kinds = table + image * COLUMNS + KINDS
    first = tl.load(kinds) == IS_CONTRAST
    second = first | (tl.load(kinds + 1) == IS_CONTRAST)
    total = tl.zeros((block,), tl.int32)
    for start in range(0, pixels, block):
        at = start + tl.arange(0, block)
        inside = at < pixels
        red, green, blue = colours(levels + image.to(tl.int64) * channels * pixels, pixels, at, inside, channels)
        for n in tl.static_range(2):
            kind = tl.where(first if n == 0 else second, -1, tl.load(kinds + n))
            red, green, blue = changed(red, green, blue, kind, tl.load(factors + image * 3 + n), 0)
        total += tl.where(inside, grey_level(red, green, blue), 0)
    tl.store(means + image, ((2 * tl.sum(total.to(tl.int64)) + pixels) // (2 * pixels)).to(tl.int32))


@triton.jit
def finish_kernel(
    table, factors, levels, means, values, result, to_image, to_channel, to_row, to_pixel, side,
    change: tl.constexpr, channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Some pixels of an image: flipped, with changed colours, as ``values`` [channels, 256] of levels, erased."""
    image, at = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    row, pixels = table + image * COLUMNS, side * side
    inside, y, x = at < pixels, at // side, at % side
    column = tl.where(tl.load(row + FLIP) != 0, side - 1 - x, x)
    seen = tl.where(tl.load(row + TURNED) != 0, column * side + y, y * side + column)
    red, green, blue = colours(levels + image.to(tl.int64) * channels * pixels, pixels, seen, inside, channels)
    if change:
        mean = tl.load(means + image)
        for n in tl.static_range(3):
            kind, factor = tl.load(row + KINDS + n), tl.load(factors + image * 3 + n)
            red, green, blue = changed(red, green, blue, kind, factor, mean)
    down, right = y - tl.load(row + ERASED), x - tl.load(row + ERASED + 1)
    height, width = tl.load(row + ERASED + 2), tl.load(row + ERASED + 3)
    erased = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    to = result + image.to(tl.int64) * to_image + y * to_row + x * to_pixel
    for channel in tl.static_range(channels):
        own = red if channel == 0 else green if channel == 1 else blue
        value = tl.load(values + channel * 256 + own, mask=inside & ~erased, other=0.0)
        tl.store(to + channel * to_channel, value, mask=inside)


def resize(table: Tensor, taps: int, height: int, rows: int, out: Tensor) -> None:
    """Write crops resized into ``out``, uint8 [images, channels, side, side].

    Args:
        table: a row for each image, see `COLUMNS`.
        taps: most pixels that one output pixel reads in a direction.
        height: of the highest crop.
        rows: of all crops.
    """
    images, channels, side, _ = out.shape
    width = triton.next_power_of_2(side)
    starts = torch.empty((images, 2, side), dtype=torch.int32, device=out.device)
    weights = torch.empty((images, 2, taps, side), dtype=torch.int32, device=out.device)
    lines = torch.empty((rows, channels, side), dtype=torch.uint8, device=out.device)
    launch(weights_kernel, (images, 2), table, starts, weights, side, taps, width)
    sizes = (side, taps, channels, ROWS, width)
    launch(widths_kernel, (images, triton.cdiv(height, ROWS)), table, starts, weights, lines, *sizes)
    launch(heights_kernel, (images, triton.cdiv(side, ROWS)), table, starts, weights, lines, out, *sizes)


def finish(table: Tensor, factors: Tensor | None, levels: Tensor, values: Tensor, out: Tensor) -> None:
    """Write values of levels, uint8 [images, channels, side, side], into ``out`` of the same shape and any strides.

    Args:
        table: a row for each image, see `COLUMNS`.
        factors: of colour changes, float32 [images, 3]; None without any.
        values: of levels, [channels, 256].
    """
    images, channels, side, _ = levels.shape
    change, means = factors is not None, table  # which are not read without changes
    of_changes = table if factors is None else factors
    if change:
        means = torch.empty(images, dtype=torch.int32, device=out.device)
        launch(means_kernel, (images,), table, of_changes, levels, means, side * side, channels, PIXELS)
    launch(
        finish_kernel, (images, triton.cdiv(side * side, PIXELS)),
        table, of_changes, levels, means, values, out, *out.stride(), side, change, channels, PIXELS,
    )  # fmt: skip


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run a kernel whose products and sums are rounded one by one."""
    kernel[grid](*arguments, enable_fp_fusion=False)
