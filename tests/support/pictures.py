"""Smooth pictures as JPEGs in class folders.

``python -m support.pictures FOLDER 20000`` writes images on which loaders are timed. Then the lines of the epochs of
``autopar train resnet50 --data imagefolder --data-dir FOLDER --img-size 224 -b 256 --loader gpu --workers 14`` say how
many images a second it trains, and which share of the time it waited for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

PHOTO = (500, 375)  # width and height of a usual image of ImageNet
CLASSES = 4


def smooth(number: int, size: tuple[int, int], noise: float = 0.0) -> Image.Image:
    """A picture of waves, determined by its number; noise, in levels of 255, makes JPEGs as large as photos."""
    generator = np.random.default_rng(number)
    width, height = size
    down, right = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    waves = generator.uniform(0.5, 2.0, (3, 3))
    pixels = [127 + 100 * np.sin(2 * np.pi * (a * down + b * right + c)) for a, b, c in waves]
    values = np.stack(pixels, -1) + noise * generator.standard_normal((height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def write_jpeg(root: Path, sizes: Sequence[tuple[int, int]], noise: float, split: str, number: int) -> None:
    path = root / split / f"class{number % CLASSES}" / f"{number:06}.jpg"
    smooth(number, sizes[number % len(sizes)], noise).save(path, quality=95)


def write_jpegs(
    root: Path, train: int, test: int, sizes: Sequence[tuple[int, int]] = (PHOTO,), noise: float = 0.0
) -> None:
    """Training and test pictures as ``train/CLASS/NUMBER.jpg`` and ``val/CLASS/NUMBER.jpg``."""
    for split, count in (("train", train), ("val", test)):
        for number in range(CLASSES):
            (root / split / f"class{number}").mkdir(parents=True)
        write = partial(write_jpeg, root, sizes, noise, split)
        if count < 1000:
            list(map(write, range(count)))
            continue
        with ProcessPoolExecutor() as processes:
            list(processes.map(write, range(count), chunksize=64))


if __name__ == "__main__":
    write_jpegs(Path(sys.argv[1]), int(sys.argv[2]), 1000, noise=8.0)
