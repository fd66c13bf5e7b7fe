"""Images with random changes, made in loader processes for a device: encoded, or decoded and cropped by Pillow.

The draws are those of timm's transform, in its order, from the same seeds as `autopar.train.data.samples.transformed`.
So an image has the crop, flip, colours and erased box that it has without a device. What Pillow decoded and cropped has
the same values too; pixels of a device's decoder and resize differ by rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from autopar.errors import UsageError
from autopar.train.data.images import Encoded, EncodedImages, Images
from autopar.train.data.sampler import Key
from autopar.train.data.samples import transformed
from autopar.train.data.streams import Stream, Unreadable
from autopar.train.data.transforms import MODES, RANDOM, Augmentation, Chain, Format, in_mode
from autopar.train.timm_optional import needed

FLAG = "--loader gpu"
INTERPOLATIONS = ("bilinear", "bicubic")  # those with antialiasing on tensors
END_OF_JPEG, TRAILING_BYTES = b"\xff\xd9", 64

Box = tuple[int, int, int, int]  # top, left, height, width


class Draws(NamedTuple):
    """Random changes of an image. ``colours`` are numbers and factors of colour changes, in order."""

    crop: Box | None = None
    interpolation: str = ""
    flip: bool = False
    colours: tuple[tuple[int, float], ...] = ()
    erased: Box | None = None


class Entry(NamedTuple):
    """An image in `Undecoded`: JPEG, or pixels uint8 of ``shape`` [channels, height, width]."""

    num_bytes: int
    shape: tuple[int, int, int]
    is_jpeg: bool
    draws: Draws
    name: str


@dataclass(frozen=True)
class Cropped:
    """Images from one loader process: pixels uint8 [images, height, width, channels], labels [images]."""

    pixels: torch.Tensor
    draws: tuple[Draws, ...]
    labels: torch.Tensor

    def pin_memory(self) -> Cropped:  # which torch's DataLoader calls
        return replace(self, pixels=self.pixels.pin_memory())


class Undecoded(NamedTuple):
    """Images from one loader process: bytes of all of them in one tensor, uint8 [bytes], and labels [images].

    A tensor for each image would be an open file for each image.
    """

    content: torch.Tensor
    entries: tuple[Entry, ...]
    labels: torch.Tensor

    @property
    def draws(self) -> Iterator[Draws]:
        return (entry.draws for entry in self.entries)


def check_device_images(images: Images | Stream, form: Format, augmentation: Augmentation) -> None:
    """Check that a device can make images.

    Raises:
        UsageError: it cannot; names the remedy.
    """
    if not isinstance(images, Stream | EncodedImages):
        raise UsageError(f"{FLAG} decodes images, and this data set is in memory. Leave it out.")
    if augmentation.aa or augmentation.shift:
        flag = f"--aa {augmentation.aa}" if augmentation.aa else f"--shift {augmentation.shift}"
        raise UsageError(f"{FLAG} cannot do {flag}, which changes images of Pillow alone. Leave one of them out.")
    names = {"--interpolation": form.interpolation, "--train-interpolation": augmentation.train_interpolation}
    for flag, name in names.items():
        if name not in (None, RANDOM, *INTERPOLATIONS):
            raise UsageError(
                f"{FLAG} cannot do {flag} {name}, which resizes images of Pillow alone. Use "
                f"{' or '.join(INTERPOLATIONS)}, or leave {FLAG} out."
            )


@dataclass(frozen=True)
class EncodedSamples(Dataset[Any]):
    """Encoded images by key."""

    images: EncodedImages

    def __getitem__(self, key: Key) -> tuple[Key, Encoded] | Unreadable:
        try:
            return key, self.images.encoded(key.index)
        except UsageError as error:
            return Unreadable(str(error))


@dataclass(frozen=True)
class Drawing:
    """Part of timm's transform that runs in loader processes; draws depend on ``seed``, None without any, and key.

    Args:
        chain: timm's transform.
    """

    chain: Chain
    form: Format
    seed: int | None

    def collate(self, samples: Sequence[tuple[Key, Encoded] | Unreadable]) -> Undecoded | Unreadable | None:
        """Images of one batch; the first unreadable one stands for all; None without any."""
        contents: list[bytes] = []
        entries: list[Entry] = []
        labels: list[int] = []
        for sample in samples:
            if isinstance(sample, Unreadable):
                return sample
            try:
                content, entry = self.entry(*sample)
            except UsageError as error:
                return Unreadable(str(error))
            contents.append(content)
            entries.append(entry)
            labels.append(sample[1].label)
        if not entries:
            return None
        content = torch.frombuffer(bytearray().join(contents), dtype=torch.uint8)
        return Undecoded(content, tuple(entries), torch.tensor(labels, device="cpu"))

    def entry(self, key: Key, sample: Encoded) -> tuple[bytes, Entry]:
        """Bytes and draws of an image; what nvJPEG does not decode is decoded by Pillow here.

        Raises:
            UsageError: the image cannot be read; names it.
        """
        content = sample.content()
        image = sample.opened(content)
        width, height = image.size
        draws = transformed(self.draws, image, self.seed, key)
        is_jpeg = (
            image.format == "JPEG"
            and image.mode in MODES.values()
            and image.info.get("adobe_transform") != 0  # colours as they are, not as luminance and chrominance
            and END_OF_JPEG in content[-TRAILING_BYTES:]  # not cut off
        )
        if not is_jpeg:
            pixels = np.asarray(sample._replace(image=content).decoded().convert(MODES[self.form.channels]))
            content = pixels.reshape(height, width, -1).transpose(2, 0, 1).tobytes()
        return content, Entry(len(content), (self.form.channels, height, width), is_jpeg, draws, sample.name)

    def draws(self, image: Any) -> Draws:
        """Random changes of a PIL image, whose pixels are not read."""
        draws = Draws()
        for step in self.chain.steps:
            draws = drawn(step, image, draws, self.form.side)
        return draws


@dataclass(frozen=True)
class Cropping:
    """Part of timm's transform that runs in loader processes if these decode, and a device does the rest.

    Args:
        chain: timm's transform.
        steps, left: its steps on PIL images that run here, and those of which only draws are made.
    """

    chain: Chain
    form: Format
    steps: tuple[Any, ...]
    left: tuple[Any, ...]

    @staticmethod
    def of(chain: Chain, form: Format) -> Cropping | None:
        """The part; None if a device cannot do the rest of the transform."""
        theirs = needed("torchvision.transforms", "Reading images")
        steps = tuple(chain.steps)
        end = next(i for i, step in enumerate(steps) if isinstance(step, theirs.ToTensor))
        if end and isinstance(steps[end - 1], theirs.ColorJitter) and steps[end - 1].hue is None:
            end -= 1
        return Cropping(chain, form, steps[:end], steps[end:]) if len(chain.transforms) == 1 else None

    def __call__(self, image: Any) -> tuple[np.ndarray, Draws]:
        """Pixels uint8 [height, width, channels] of a PIL image, and the changes that are left."""
        image = in_mode(image, self.chain.mode)
        for step in self.steps:
            image = step(image)
        draws = Draws()
        for step in self.left:
            draws = drawn(step, image, draws, self.form.side)
        pixels = np.asarray(image)
        return pixels.reshape(*pixels.shape[:2], -1), draws


def collate_cropped(samples: Sequence[tuple[tuple[np.ndarray, Draws], int] | Unreadable]) -> Cropped | Unreadable:
    """Samples of a `Cropping` as a share of a batch; or the first unreadable one."""
    pixels, draws, labels = [], [], []
    for sample in samples:
        if isinstance(sample, Unreadable):
            return sample
        (image, changes), label = sample
        pixels.append(image)
        draws.append(changes)
        labels.append(label)
    return Cropped(torch.from_numpy(np.stack(pixels)), tuple(draws), torch.tensor(labels, device="cpu"))


def drawn(step: Any, image: Any, draws: Draws, side: int) -> Draws:
    """Draws with what one step of timm's transform draws for a PIL image, whose pixels are not read."""
    ours, theirs = needed("timm.data.transforms", FLAG), needed("torchvision.transforms", FLAG)
    if isinstance(step, ours.RandomResizedCropAndInterpolation):
        box, mode = step.get_params(image, step.scale, step.ratio), step.interpolation
        return draws._replace(crop=box, interpolation=(random.choice(mode) if isinstance(mode, tuple) else mode).value)
    if isinstance(step, theirs.RandomHorizontalFlip):
        return draws._replace(flip=bool(torch.rand(1, device="cpu") < step.p))
    if isinstance(step, theirs.ColorJitter):
        order, *factors = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
        changes = ((number, factors[number]) for number in order.tolist())
        return draws._replace(colours=tuple(change for change in changes if change[1] is not None))
    if isinstance(step, needed("timm.data.random_erasing", FLAG).RandomErasing):
        erased = (step(torch.ones(1, side, side, device="cpu"))[0] == 0).nonzero()
        if len(erased):
            (top, left), (bottom, right) = erased[[0, -1]].tolist()
            return draws._replace(erased=(top, left, bottom + 1 - top, right + 1 - left))
    return draws
