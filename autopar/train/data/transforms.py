"""From a PIL image to the tensor that a model takes: timm's transforms, chosen by its own flag names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.train.timm_optional import needed

Transform = Callable[[Any], torch.Tensor]
MODES = {1: "L", 3: "RGB"}  # channels -> what PIL calls it


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, named as timm's flags.

    ``shift`` moves the finished image by up to so many pixels, its border repeated; ``scale`` and ``ratio`` are the
    area and the aspect of the random crop that is resized; (1, 1) takes the whole image.
    """

    shift: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    hflip: float = 0.0
    color_jitter: float = 0.0
    aa: str | None = None
    reprob: float = 0.0

    @property
    def random(self) -> bool:
        """Whether it changes anything."""
        return self != Augmentation()


@dataclass(frozen=True)
class Format:
    """What every image of a run is turned into: its size, and the pixels' mean and deviation by channel.

    ``crop`` is the share of the side that evaluation sees, the middle.
    """

    channels: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.side, self.side)


def image_format(
    channels: int, side: int, mean: tuple[float, ...], std: tuple[float, ...], crop: float = 1.0
) -> Format:
    """A format with statistics for as many channels as asked for: those of colours are averaged for grey, and the other
    way round grey ones are repeated.

    Raises:
        UsageError: images have neither so many nor so few channels.
    """
    if channels not in MODES:
        raise UsageError(
            f"The model takes {channels} channels; images have 3 (or 1, grey). Build it with in_chans=3 or in_chans=1."
        )
    if len(mean) != channels:
        mean, std = ((sum(v) / len(v),) * channels for v in (mean, std))
    return Format(channels, side, mean, std, crop)


def training_transform(form: Format, augmentation: Augmentation) -> Transform:
    """What training images go through.

    Raises:
        UsageError: a setting that timm does not understand.
    """
    if not augmentation.random:
        return evaluation_transform(form)
    if augmentation.aa and form.channels != 3:
        raise UsageError(f"--aa {augmentation.aa} changes colours, but the images are grey. Leave it out.")
    try:
        transform = needed("timm.data", "Augmentation").create_transform(
            form.shape,
            is_training=True,
            scale=augmentation.scale,
            ratio=augmentation.ratio,
            hflip=augmentation.hflip,
            color_jitter=augmentation.color_jitter or None,
            auto_augment=augmentation.aa,
            re_prob=augmentation.reprob,
            interpolation="bilinear",
            mean=form.mean,
            std=form.std,
        )
    except (AssertionError, KeyError, ValueError, IndexError, TypeError) as error:
        raise UsageError(
            f"timm does not understand these settings: {augmentation}: {type(error).__name__}: {error}. "
            "--aa takes texts such as rand-m9-mstd0.5, augmix-m5-w4-d2 or original."
        ) from error
    shifts = []
    if augmentation.shift:
        crop = needed("torchvision.transforms", "Augmentation").RandomCrop
        shifts = [crop(form.side, padding=augmentation.shift, padding_mode="edge")]
    return Chain(MODES[form.channels], (transform, *shifts))


def evaluation_transform(form: Format) -> Transform:
    """What test images go through: resized, the middle cut out, normalised."""
    transform = needed("timm.data", "Reading images").create_transform(
        form.shape, interpolation="bilinear", mean=form.mean, std=form.std, crop_pct=form.crop
    )
    return Chain(MODES[form.channels], (transform,))


@dataclass(frozen=True)
class Chain:
    """An image in a PIL mode, through transforms one after the other."""

    mode: str
    transforms: tuple[Callable[[Any], Any], ...]

    def __call__(self, image: Any) -> torch.Tensor:
        image = image.convert(self.mode)
        for transform in self.transforms:
            image = transform(image)
        return image
