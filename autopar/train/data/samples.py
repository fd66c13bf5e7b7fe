"""Samples as tensors and batches of them, made in the processes that read images."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from autopar.errors import UsageError
from autopar.train.data.images import Encoded, Images
from autopar.train.data.sampler import Key
from autopar.train.data.streams import Unreadable

T = TypeVar("T")


@dataclass(frozen=True)
class ImageSamples(Dataset[Any]):
    """Transformed images with labels, by key; random transforms depend on ``seed``, None without any, and key alone."""

    images: Images
    transform: Callable[[Any], Any]
    seed: int | None

    def __getitem__(self, key: Key) -> tuple[Any, int] | Unreadable:
        try:
            image = transformed(self.transform, self.images.image(key.index), self.seed, key)
        except UsageError as error:
            return Unreadable(str(error))
        return image, int(self.images.labels[key.index])


def transformed(transform: Callable[[Any], T], image: Any, seed: int | None, key: Key) -> T:
    """Result of a transform of an image; random changes are drawn from seed and key, unless the seed is None.

    Raises:
        UsageError: Pillow cannot change the image so.
    """
    try:
        with nullcontext() if seed is None else seeded(seed, *key):
            return transform(image)
    except ValueError as error:
        raise UsageError(
            f"Pillow cannot change image {key.index} of {'×'.join(map(str, image.size))} as timm's transform asks: "
            f"{error}. Change --aa, or the image."
        ) from error


@contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Within ``with``, Python, numpy and torch draw from this seed on CPU; their states are restored afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draws = np.random.SeedSequence([part & 0xFFFFFFFF for part in seed]).generate_state(3)
    random.seed(int(draws[0]))
    np.random.seed(draws[1])
    torch.default_generator.manual_seed(int(draws[2]))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def collate(
    samples: Sequence[tuple[torch.Tensor, int] | Unreadable], memory_format: torch.memory_format
) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
    """Samples as a batch, images [batch, channels, height, width] and labels [batch]; or the first unreadable one."""
    good = [s for s in samples if not isinstance(s, Unreadable)]
    if len(good) < len(samples):
        return next(s for s in samples if isinstance(s, Unreadable))
    images = torch.stack([image for image, _ in good]).contiguous(memory_format=memory_format)
    return images, torch.tensor([label for _, label in good], device="cpu")


def collate_encoded(
    samples: Sequence[tuple[Key, Encoded]],
    transform: Callable[[Any], Any],
    seed: int | None,
    collate: Callable[[Sequence[tuple[Any, int]]], T],
) -> T | Unreadable | None:
    """A part of a batch of encoded images, which are transformed here; None without any."""
    made: list[tuple[Any, int]] = []
    for key, sample in samples:
        try:
            made.append((transformed(transform, sample.decoded(), seed, key), sample.label))
        except UsageError as error:
            return Unreadable(str(error))
    return collate(made) if made else None


def collate_labels(
    samples: Sequence[tuple[Key, Encoded]], shape: tuple[int, ...], layout: torch.memory_format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of encoded images, with images on the meta device."""
    return without_images([sample.label for _, sample in samples], shape, layout)


def without_images(
    labels: Sequence[int], shape: tuple[int, ...], layout: torch.memory_format
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of images of a shape on the meta device, and their labels [batch]."""
    x = torch.empty(len(labels), *shape, device="meta", memory_format=layout)
    return x, torch.tensor(labels, device="cpu")
