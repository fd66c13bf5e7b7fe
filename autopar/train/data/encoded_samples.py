"""Encoded images with their random changes, made in loader processes; a device decodes and changes them.

The draws are those of timm's transform, in its order, from the same seeds as `autopar.train.data.samples.transformed`.
So an image has the crop, flip, colours and erased box that it has without a device. Its pixels differ by rounding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from autopar.errors import UsageError
from autopar.train.data.images import Encoded, EncodedImages, Images
from autopar.train.data.sampler import Key
from autopar.train.data.samples import transformed
from autopar.train.data.streams import Stream, Unreadable
from autopar.train.data.transforms import MODES, RANDOM, Augmentation, Chain, Format
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


class Undecoded(NamedTuple):
    """Images from one loader process: bytes of all of them in one tensor, uint8 [bytes], and labels [images].

    A tensor for each image would be an open file for each image.
    """

    content: torch.Tensor
    entries: tuple[Entry, ...]
    labels: torch.Tensor


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
        ours, theirs = needed("timm.data.transforms", FLAG), needed("torchvision.transforms", FLAG)
        erasing = needed("timm.data.random_erasing", FLAG).RandomErasing
        draws = Draws()
        for step in self.chain.steps:
            if isinstance(step, ours.RandomResizedCropAndInterpolation):
                box, mode = step.get_params(image, step.scale, step.ratio), step.interpolation
                draws = draws._replace(
                    crop=box, interpolation=(random.choice(mode) if isinstance(mode, tuple) else mode).value
                )
            elif isinstance(step, theirs.RandomHorizontalFlip):
                draws = draws._replace(flip=bool(torch.rand(1, device="cpu") < step.p))
            elif isinstance(step, theirs.ColorJitter):
                order, *factors = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
                changes = ((number, factors[number]) for number in order.tolist())
                draws = draws._replace(colours=tuple(change for change in changes if change[1] is not None))
            elif isinstance(step, erasing):
                kept = step(torch.ones(1, self.form.side, self.form.side, device="cpu"))[0]
                erased = (kept == 0).nonzero()
                if len(erased):
                    (top, left), (bottom, right) = erased[[0, -1]].tolist()
                    draws = draws._replace(erased=(top, left, bottom + 1 - top, right + 1 - left))
        return draws
