"""Transforms from a PIL image to the model's input tensor: timm's, chosen by timm's flag names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.train.timm_optional import needed

Transform = Callable[[Any], torch.Tensor]
MODES = {1: "L", 3: "RGB"}  # channels -> PIL mode


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, named as timm's flags.

    ``shift`` moves the final image by up to so many pixels and repeats its border. ``scale`` and ``ratio`` are the area
    and the aspect ratio of the random crop that is resized; (1, 1) takes the whole image.
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
        """Whether the augmentation changes anything."""
        return self != Augmentation()


@dataclass(frozen=True)
class Format:
    """Format of the images of a run: size, and mean and standard deviation of pixels by channel.

    ``crop`` is the fraction of the side, around the centre, that evaluation sees.
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
    """A format with statistics for the channels: averaged from colours to grey, repeated from grey to colours.

    Raises:
        UsageError: the channels are neither 1 nor 3.
    """
    if channels not in MODES:
        raise UsageError(
            f"The model takes {channels} channels; images have 3 (or 1, grey). Build it with in_chans=3 or in_chans=1."
        )
    if len(mean) != channels:
        mean, std = ((sum(v) / len(v),) * channels for v in (mean, std))
    return Format(channels, side, mean, std, crop)


def training_transform(form: Format, augmentation: Augmentation) -> Transform:
    """Transform of training images.

    Raises:
        UsageError: timm does not understand a setting.
    """
    if not augmentation.random:
        return evaluation_transform(form)
    if augmentation.aa and form.channels != 3:
        raise UsageError(f"--aa {augmentation.aa} changes colours, but the images are grey. Leave it out.")
    try:
        transform = made_by_timm(
            "Augmentation",
            form,
            is_training=True,
            scale=augmentation.scale,
            ratio=augmentation.ratio,
            hflip=augmentation.hflip,
            color_jitter=augmentation.color_jitter or None,
            auto_augment=augmentation.aa,
            re_prob=augmentation.reprob,
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
    """Transform of test images: resize, centre crop, normalise."""
    return Chain(MODES[form.channels], (made_by_timm("Reading images", form, crop_pct=form.crop),))


def made_by_timm(purpose: str, form: Format, **options: Any) -> Transform:
    """timm's transform to a format, with its tensors on the CPU."""
    create = needed("timm.data", purpose).create_transform
    with torch.device("cpu"):
        return create(form.shape, interpolation="bilinear", mean=form.mean, std=form.std, **options)


@dataclass(frozen=True)
class Chain:
    """Conversion to a PIL mode, followed by transforms in order."""

    mode: str
    transforms: tuple[Callable[[Any], Any], ...]

    def __call__(self, image: Any) -> torch.Tensor:
        image = image.convert(self.mode)
        for transform in self.transforms:
            image = transform(image)
        return image
