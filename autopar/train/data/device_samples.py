"""Images made in loader processes for a GPU, which does the rest of timm's transform: encoded, or decoded and cropped.

The draws are those of timm's transform, in its order, from the same seeds as `autopar.train.data.samples.transformed`.
So an image has the crop, flip, colours and erased box, and if Pillow decoded it the very values, that it has without a
GPU. What a GPU cannot do, the processes do before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
INTERPOLATIONS = ("bilinear", "bicubic")  # those of a GPU
END_OF_JPEG, TRAILING_BYTES = b"\xff\xd9", 64
CONTRAST, SATURATION = 1, 2  # kinds of colour changes in torchvision's ColorJitter; brightness is 0
# A process resizes a crop of more pixels than so many times the result's, so that a GPU's memory does not depend on it.
LARGE_CROP = 4

Box = tuple[int, int, int, int]  # top, left, height, width
Pair = tuple[int, int]  # height, width


class Draws(NamedTuple):
    """The steps of timm's transform that a GPU does for one image, with their random values.

    Args:
        crop: part of the image that is resized, by default to its own size.
        resized: size of the crop then.
        first: row and column of the result in the resized crop.
        kinds, factors: of the colour changes, in order; kind -1 is none.
        erased: by default nothing.
    """

    crop: Box
    resized: Pair
    first: Pair = (0, 0)
    cubic: bool = False
    flip: bool = False
    kinds: tuple[int, ...] = (-1, -1, -1)
    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    erased: Box = (0, 0, 0, 0)

    @staticmethod
    def of(size: Pair) -> Draws:
        """Draws that change nothing in an image of a size."""
        return Draws((0, 0, *size), size)


class Prepared(NamedTuple):
    """A JPEG, uint8 [bytes], or pixels, uint8 [height, width, channels]; their size; the steps that a GPU does."""

    content: np.ndarray
    size: Pair
    draws: Draws


# An image in a `Share`: whether its bytes are a JPEG's, their number, and the size of its pixels, before its draws.
RECORD = np.dtype([
    ("jpeg", "?"), ("num_bytes", "i8"), ("size", "i8", 2), ("crop", "i8", 4), ("resized", "i8", 2), ("first", "i8", 2),
    ("cubic", "?"), ("flip", "?"), ("kinds", "i8", 3), ("factors", "f4", 3), ("erased", "i8", 4),
], align=True)  # fmt: skip


@dataclass(frozen=True)
class Share:
    """Images of a batch from one loader process, their bytes one after another: a JPEG's, or [height, width, channels].

    One tensor holds them all, since each tensor from a process would be an open file.

    Args:
        content: uint8 [bytes].
        records: of each image, of type `RECORD`.
        names: of JPEGs, for messages; others may have none.
        labels: [images].
    """

    content: torch.Tensor
    records: np.ndarray
    names: tuple[str, ...]
    labels: torch.Tensor

    @staticmethod
    def of(images: Sequence[Prepared], names: Sequence[str], labels: Sequence[int]) -> Share:
        """Share of images."""
        rows = [(content.ndim == 1, content.size, size, *draws) for content, size, draws in images]
        content = torch.from_numpy(np.concatenate([image.content.reshape(-1) for image in images]))
        return Share(content, np.array(rows, RECORD), tuple(names), torch.tensor(labels, device="cpu"))

    def pin_memory(self) -> Share:  # which torch's DataLoader calls
        return replace(self, content=self.content.pin_memory())


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
class Preparation:
    """Part of timm's transform that loader processes do for a GPU.

    Args:
        steps, left: steps on PIL images that are done here, and those of which only draws are made.
        seed: of draws from encoded images, which depend on it and an image's key; None without any.
    """

    mode: str
    side: int
    steps: tuple[Any, ...]
    left: tuple[Any, ...]
    seed: int | None

    @staticmethod
    def of(chain: Chain, form: Format, seed: int | None) -> Preparation | None:
        """The part; None if a GPU can do nothing after it."""
        if len(chain.transforms) > 1:
            return None
        steps = tuple(chain.steps)
        done = next((n for n in range(len(steps), 0, -1) if not a_gpu_does(steps[n - 1], n == 1, form)), 0)
        return Preparation(chain.mode, form.side, steps[:done], steps[done:], seed)

    def __call__(self, image: Any) -> Prepared:
        """Pixels of a PIL image, cropped, and the steps that a GPU does."""
        image = in_mode(image, self.mode)
        for step in self.steps:
            image = step(image)
        draws = self.draws(image)
        top, left, height, width = draws.crop
        image = image.crop((left, top, left + width, top + height))
        if height * width > LARGE_CROP * self.side**2:
            resampling = needed("PIL.Image", "Reading images", "pillow").Resampling
            image = image.resize(draws.resized[::-1], resampling.BICUBIC if draws.cubic else resampling.BILINEAR)
            top, left = draws.first
            image = image.crop((left, top, left + self.side, top + self.side))
            draws = draws._replace(first=(0, 0), resized=(self.side, self.side))
        size = (image.height, image.width)
        return Prepared(np.asarray(image).reshape(*size, len(self.mode)), size, draws._replace(crop=(0, 0, *size)))

    def draws(self, image: Any) -> Draws:
        """Draws of the steps that are left for a PIL image, whose pixels are not read."""
        draws = Draws.of(image.size[::-1])
        for step in self.left:
            draws = drawn(step, image, draws, self.side)
        return draws

    def encoded(self, key: Key, sample: Encoded) -> Prepared:
        """A JPEG as it is, and its draws; what nvJPEG does not decode is decoded by Pillow here.

        Raises:
            UsageError: the image cannot be read; names it.
        """
        content = sample.content()
        image = sample.opened(content)
        is_jpeg = (
            image.format == "JPEG"
            and image.mode in MODES.values()
            and image.info.get("adobe_transform") != 0  # colours as they are, not as luminance and chrominance
            and END_OF_JPEG in content[-TRAILING_BYTES:]  # not cut off
        )
        if is_jpeg and not self.steps:
            draws = transformed(self.draws, image, self.seed, key)
            return Prepared(np.frombuffer(content, np.uint8), image.size[::-1], draws)
        return transformed(self, sample._replace(image=content).decoded(), self.seed, key)

    def collate_encoded(self, samples: Sequence[tuple[Key, Encoded] | Unreadable]) -> Share | Unreadable | None:
        """Share of a batch of encoded images; the first unreadable one stands for all; None without any."""
        made: list[tuple[Prepared, str, int]] = []
        for sample in samples:
            if isinstance(sample, Unreadable):
                return sample
            try:
                made.append((self.encoded(*sample), sample[1].name, sample[1].label))
            except UsageError as error:
                return Unreadable(str(error))
        return Share.of(*zip(*made)) if made else None


def collate_prepared(samples: Sequence[tuple[Prepared, int] | Unreadable]) -> Share | Unreadable:
    """Share of a batch of images that were decoded; the first unreadable one stands for all."""
    made: list[tuple[Prepared, int]] = []
    for sample in samples:
        if isinstance(sample, Unreadable):
            return sample
        made.append(sample)
    images, labels = zip(*made)
    return Share.of(images, (), labels)


def a_gpu_does(step: Any, first: bool, form: Format) -> bool:
    """Whether a GPU does a step of timm's transform, the first or a later one."""
    ours, theirs = needed("timm.data.transforms", FLAG), needed("torchvision.transforms", FLAG)
    if isinstance(step, ours.RandomResizedCropAndInterpolation):
        modes = step.interpolation if isinstance(step.interpolation, tuple) else (step.interpolation,)
        return first and all(mode.value in INTERPOLATIONS for mode in modes)
    if isinstance(step, theirs.Resize):
        return first and step.interpolation.value in INTERPOLATIONS
    if isinstance(step, theirs.CenterCrop):
        return form.crop_pct <= 1  # others have borders
    if isinstance(step, theirs.ColorJitter):
        return step.hue is None
    rest = (theirs.RandomHorizontalFlip, theirs.ToTensor, theirs.Normalize)
    return isinstance(step, (*rest, needed("timm.data.random_erasing", FLAG).RandomErasing))


def drawn(step: Any, image: Any, draws: Draws, side: int) -> Draws:
    """Draws with what one step of timm's transform draws for a PIL image, whose pixels are not read."""
    ours, theirs = needed("timm.data.transforms", FLAG), needed("torchvision.transforms", FLAG)
    if isinstance(step, ours.RandomResizedCropAndInterpolation):
        box, mode = step.get_params(image, step.scale, step.ratio), step.interpolation
        mode = random.choice(mode) if isinstance(mode, tuple) else mode
        return draws._replace(crop=box, resized=(side, side), cubic=mode.value == "bicubic")
    if isinstance(step, theirs.Resize):
        return draws._replace(resized=resized(draws.resized, step.size), cubic=step.interpolation.value == "bicubic")
    if isinstance(step, theirs.CenterCrop):
        return draws._replace(first=tuple(round((length - side) / 2) for length in draws.resized))
    if isinstance(step, theirs.RandomHorizontalFlip):
        return draws._replace(flip=bool(torch.rand(1, device="cpu") < step.p))
    if isinstance(step, theirs.ColorJitter):
        order, *factors = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
        changes = [(kind, factors[kind]) for kind in order.tolist() if factors[kind] is not None]
        kinds, factors = zip(*changes, *[(-1, 1.0)] * (3 - len(changes)))
        return draws._replace(kinds=kinds, factors=factors)
    if isinstance(step, needed("timm.data.random_erasing", FLAG).RandomErasing):
        erased = (step(torch.ones(1, side, side, device="cpu"))[0] == 0).nonzero()
        if len(erased):
            (top, left), (bottom, right) = erased[[0, -1]].tolist()
            return draws._replace(erased=(top, left, bottom + 1 - top, right + 1 - left))
    return draws


def resized(size: Pair, wanted: Any) -> Pair:
    """Size of an image after torchvision's Resize to a size, or of its shorter side to a length."""
    if not isinstance(wanted, int):
        return tuple(wanted)
    short = min(size)
    height, width = (wanted if length == short else int(wanted * length / short) for length in size)
    return height, width
