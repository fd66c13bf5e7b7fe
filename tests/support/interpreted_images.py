"""Kernels that make batches of images, by Triton's interpreter, against Pillow.

Interpreted kernels need TRITON_INTERPRET=1 from the first import of triton, so a process of their own.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from autopar.train.data import image_kernels
from autopar.train.data.device_images import table_of
from autopar.train.data.device_samples import RECORD, Draws
from support import image_reference

SIDE = 20
MODULES = (image_kernels, image_reference)


def images(channels: int, generator: random.Random) -> tuple[list[torch.Tensor], np.ndarray]:
    """Noise of several sizes in both layouts, and draws of all kinds."""
    made, rows = [], []
    noise = torch.Generator().manual_seed(generator.randrange(100))
    for number in range(8):
        height, width = (90, 24) if number == 2 else generator.choice([(20, 20), (61, 45), (7, 90), (30, 20), (3, 5)])
        size = (channels, height, width) if number % 2 else (height, width, channels)
        pixels = torch.randint(0, 256, size, generator=noise, dtype=torch.uint8)
        made.append(pixels if number % 2 else pixels.permute(2, 0, 1))
        top, left = generator.randrange(height), generator.randrange(width)
        crop = (top, left, generator.randint(1, height - top) * (number != 3), generator.randint(1, width - left))
        first = (generator.randrange(5), generator.randrange(5)) if number % 3 == 0 else (0, 0)
        resized = (SIDE + first[0] + generator.randrange(3), SIDE + first[1] + generator.randrange(3))
        kinds = generator.sample([0, 1, 2], 3) if number < 6 else [1, -1, -1] if number == 6 else [-1, -1, -1]
        factors = [generator.choice([generator.uniform(0, 2.5), 1.0, 0.0]) for _ in range(3)]
        erased = (3, 4, 5, 16) if number % 2 else (0, 0, 0, 0)
        draws = Draws(crop, resized, first, number % 4 < 2, number % 3 == 1, tuple(kinds), tuple(factors), erased)
        if number == 2:  # which Pillow 13 resizes in height first
            draws = draws._replace(crop=(0, 0, height, width))
        rows.append((False, pixels.numel(), (height, width), *draws))
    return made, np.array(rows, RECORD)


def check_images(channels: int, seed: int) -> None:
    """Noise with all kinds of draws."""
    made, records = images(channels, random.Random(seed))
    if seed == 2:
        records["kinds"] = -1
    addresses, strides = np.array([image.data_ptr() for image in made]), np.array([image.stride() for image in made])
    table = torch.from_numpy(table_of(addresses, strides[:, [1, 2, 0]], records))
    values = torch.randn(channels, 256, dtype=torch.float64 if seed else torch.float32)
    results = []
    for module in MODULES:
        levels = torch.zeros(len(made), channels, SIDE, SIDE, dtype=torch.uint8)
        module.resize(table, int(table[:, -1].max()), int(table[:, 0].max()), int(table[:, 0].sum()), levels)
        layout = torch.channels_last if seed == 1 else torch.contiguous_format
        out = torch.full(levels.shape, 7.0, dtype=values.dtype).to(memory_format=layout)
        module.finish(table, torch.tensor(records["factors"]) if seed < 2 else None, levels, values, out)
        results.append((levels, out))
    (levels, ours), (expected_levels, expected) = results
    assert torch.equal(levels, expected_levels) and levels.float().std() > 20
    assert torch.equal(ours, expected)


def check_means() -> None:
    """A half is rounded up by contrast; a mean just below it is not."""
    levels = torch.full((3, 1, SIDE, SIDE), 40, dtype=torch.uint8)
    levels[0, :, : SIDE // 2] = levels[1, :, : SIDE // 2] = 41
    levels[1, 0, 0, 0] = 40
    records = np.array(
        [(False, 1, (1, 1), *Draws.of((1, 1))._replace(kinds=(1, -1, -1), factors=(0.0,) * 3))] * 3, RECORD
    )
    table = torch.from_numpy(table_of(np.zeros(3, np.int64), np.zeros((3, 3), np.int64), records))
    values = torch.arange(256.0)[None]
    ours, expected = torch.empty(2, 3, 1, SIDE, SIDE)
    for module, out in zip(MODULES, (ours, expected), strict=True):
        module.finish(table, torch.tensor(records["factors"]), levels, values, out)
    assert torch.equal(ours, expected) and ours[:, 0, 0, 0].tolist() == [41.0, 40.0, 40.0]


if __name__ == "__main__":
    image_kernels.ROWS = 64  # each program takes the interpreter long
    for channels, seed in ((3, 0), (3, 1), (1, 2)):
        check_images(channels, seed)
    check_means()
    print("equal")
