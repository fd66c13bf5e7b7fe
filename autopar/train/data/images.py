"""Labelled images by index: in memory, in files, or random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from autopar.errors import UsageError
from autopar.train.timm_optional import needed


class Images(Protocol):
    """Training or test images of a data set; labels are known without reading an image."""

    @property
    def labels(self) -> Sequence[int]: ...

    def image(self, index: int) -> Any:
        """The PIL image at an index."""
        ...


@dataclass(frozen=True)
class Arrays:
    """Images in memory: uint8 [samples, height, width] or [samples, height, width, 3]."""

    pixels: np.ndarray
    labels: Sequence[int]

    def image(self, index: int) -> Any:
        return pillow().fromarray(self.pixels[index])


@dataclass(frozen=True)
class Files:
    """Images in files."""

    paths: Sequence[str]
    labels: Sequence[int]
    load: Callable[[str], Any]

    def image(self, index: int) -> Any:
        """The image in a file.

        Raises:
            UsageError: the file cannot be read; names it.
        """
        try:
            return self.load(self.paths[index])
        except (OSError, SyntaxError) as error:  # Pillow raises the latter for some broken files
            raise UsageError(
                f"Cannot read image {index} of {len(self.paths)}, {self.paths[index]}: {error}. "
                "Replace the file, or take it out of the folder."
            ) from error


@dataclass(frozen=True)
class Noise:
    """Square images of random pixels, determined by seed, ``stream`` (training or test) and index."""

    labels: Sequence[int]
    side: int
    seed: int
    stream: int

    def image(self, index: int) -> Any:
        pixels = np.random.default_rng([self.seed, self.stream, index]).integers(0, 256, (self.side, self.side, 3))
        return pillow().fromarray(pixels.astype(np.uint8))


@dataclass(frozen=True)
class First:
    """The first images of a data set, as many as there are labels."""

    images: Images
    labels: Sequence[int]

    def image(self, index: int) -> Any:
        return self.images.image(index)


def pillow() -> Any:
    return needed("PIL.Image", "Reading images", "pillow")
