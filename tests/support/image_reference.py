"""The functions of `autopar.train.data.image_kernels`, computed by Pillow on the CPU, image by image."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from autopar.train import data

ENHANCERS: tuple[Any, ...] = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this module in place of the kernels, which test_image_kernels.py compares with it."""
    monkeypatch.setattr(data, "image_kernels", sys.modules[__name__], raising=False)


def resize(table: Tensor, taps: int, height: int, rows: int, out: Tensor) -> None:
    """Write crops resized into ``out``, uint8 [images, channels, side, side]."""
    _, channels, side, _ = out.shape
    for row, to in zip(table.tolist(), out, strict=True):
        tall, columns, high, wide, top, left, cubic, address, *strides = row[:11]
        assert tall <= height
        if tall * columns == 0:  # timm draws such crops of images of few pixels
            to.copy_(
                levels_of(Image.new("RGB" if channels == 3 else "L", (1, 1)).crop((0, 0, 0, 0)).resize((side, side)))
            )
            continue
        last = (tall - 1) * strides[0] + (columns - 1) * strides[1] + (channels - 1) * strides[2]
        content = np.frombuffer((ctypes.c_uint8 * (last + 1)).from_address(address), np.uint8)
        pixels = np.lib.stride_tricks.as_strided(content, (tall, columns, channels), strides)
        method = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        image = picture(pixels).resize((wide, high), method).crop((left, top, left + side, top + side))
        to.copy_(levels_of(image))


def finish(table: Tensor, factors: Tensor | None, levels: Tensor, values: Tensor, out: Tensor) -> None:
    """Write values of flipped, changed and erased levels into ``out``."""
    for n, (row, own, to) in enumerate(zip(table.tolist(), levels, out, strict=True)):
        image = picture(own.permute(2, 1, 0).numpy() if row[19] else own.permute(1, 2, 0).numpy())
        flip, kinds, (top, left, height, width) = row[11], row[12:15], row[15:19]
        image = ImageOps.mirror(image) if flip else image
        for change, kind in enumerate(kinds):
            if kind >= 0:
                assert factors is not None
                image = ENHANCERS[kind](image).enhance(float(factors[n, change]))
        for channel, level in enumerate(levels_of(image)):
            to[channel] = values[channel][level.long()]
        to[:, top : top + height, left : left + width] = 0


def picture(pixels: np.ndarray) -> Image.Image:
    """Image of pixels uint8 [height, width, channels]."""
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))


def levels_of(image: Image.Image) -> Tensor:
    """Levels uint8 [channels, height, width]."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(*pixels.shape[:2], -1).permute(2, 0, 1)
