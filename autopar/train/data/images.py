"""Labelled images by index: in memory, in files, or random."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import fsspec
import numpy as np

from autopar.errors import UsageError
from autopar.train.timm_optional import needed

# What Pillow raises for broken files, by their place in it.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, OverflowError, struct.error, zlib.error)


class Encoded(NamedTuple):
    """An image as it lies in its file, or the file's path or address (a text); its class, and a name for messages."""

    image: bytes | Path | str
    label: int
    name: str

    def content(self) -> bytes:
        """Bytes of the file.

        Raises:
            UsageError: they cannot be read; names the image.
        """
        with self.named_errors():
            if isinstance(self.image, bytes):
                return self.image
            return self.image.read_bytes() if isinstance(self.image, Path) else read_bytes(self.image)

    def opened(self, content: bytes) -> Any:
        """PIL image of which only the header is read.

        Raises:
            UsageError: it is no image; names it.
        """
        with self.named_errors():
            return pillow().open(BytesIO(content))

    def decoded(self) -> Any:
        """The PIL image.

        Raises:
            UsageError: it cannot be read; names it.
        """
        image = self.opened(self.content())
        with self.named_errors():
            image.load()
        return image

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Context that turns errors of reading and of Pillow into a UsageError that names the image."""
        try:
            yield
        except (*BROKEN, pillow().DecompressionBombError) as error:
            reason = str(error).split(" <_io.BytesIO")[0] or type(error).__name__
            raise UsageError(
                f"Cannot read image {self.name}: {reason}. Replace it by another to resume a run. Without it, start a "
                "new run."
            ) from error


def read_bytes(path: str) -> bytes:
    """Content of a file, by its path or address."""
    with fsspec.open(path, "rb") as file:
        return file.read()  # type: ignore[union-attr]  # fsspec declares no type of one file


class Images(Protocol):
    """Training or test images of a data set, a dataclass; labels are known without reading an image."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def labels(self) -> Sequence[int]: ...

    def image(self, index: int) -> Any:
        """The PIL image at an index.

        Raises:
            UsageError: it cannot be read; names it.
        """
        ...


@runtime_checkable
class EncodedImages(Images, Protocol):
    """Images that have to be decoded."""

    def encoded(self, index: int) -> Encoded:
        """The encoded image at an index."""
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

    def encoded(self, index: int) -> Encoded:
        path = self.paths[index]
        return Encoded(Path(path), self.labels[index], f"{index} of {len(self.paths)}, {path}")

    def image(self, index: int) -> Any:
        return self.encoded(index).decoded()


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


def pillow() -> Any:
    return needed("PIL.Image", "Reading images", "pillow")
