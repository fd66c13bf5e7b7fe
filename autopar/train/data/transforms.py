"""Transforms from a PIL image to the model's input tensor: timm's, chosen by timm's flag names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from autopar.errors import UsageError
from autopar.train.data.images import pillow
from autopar.train.timm_optional import needed

Transform = Callable[[Any], torch.Tensor]
MODES = {1: "L", 3: "RGB"}  # channels -> PIL mode
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # timm's names
RESIZES_ONLY = ("box", "hamming", "lanczos")
RANDOM = "random"  # bilinear or bicubic, drawn for each training image


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images, named as timm's flags.

    ``shift`` moves the final image by up to so many pixels and repeats its border. ``scale`` and ``ratio`` are the area
    and the aspect ratio of the random crop that is resized; (1, 1) takes the whole image. ``train_interpolation``
    resizes that crop; None takes the format's.
    """

    shift: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    hflip: float = 0.0
    color_jitter: float = 0.0
    aa: str | None = None
    reprob: float = 0.0
    train_interpolation: str | None = None

    @property
    def random(self) -> bool:
        """Whether the augmentation changes anything."""
        return self != Augmentation()


@dataclass(frozen=True)
class Format:
    """Format of the images of a run: size, mean and standard deviation of pixels by channel, and how images get it.

    The last three fields are those of timm's data config. ``crop_pct`` is the fraction of the resized image's side that
    evaluation sees, ``crop_mode`` is center, squash or border.
    """

    channels: int
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop_pct: float = 1.0
    crop_mode: str = "center"

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.side, self.side)

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return (
            f"{self.channels}×{self.side}×{self.side}, mean {mean}, std {std}, {self.interpolation}, "
            f"{self.crop_mode} crop of {self.crop_pct:.4g}"
        )


def image_format(
    channels: int,
    side: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    interpolation: str = "bilinear",
    crop_pct: float = 1.0,
    crop_mode: str = "center",
) -> Format:
    """A format with statistics for the channels: averaged from colours to grey, repeated from grey to colours.

    Raises:
        UsageError: the channels are neither 1 nor 3, or the interpolation is unknown.
    """
    if channels not in MODES:
        raise UsageError(
            f"The model takes {channels} channels; images have 3 (or 1, grey). Build it with in_chans=3 or in_chans=1."
        )
    check_interpolation("--interpolation", interpolation, INTERPOLATIONS)
    if len(mean) != channels:
        mean = (sum(mean) / len(mean),) * channels
    if len(std) != channels:
        std = (sum(std) / len(std),) * channels
    return Format(channels, side, mean, std, interpolation, crop_pct, crop_mode)


def check_interpolation(flag: str, name: str, known: tuple[str, ...]) -> None:
    """Raise a UsageError if the name of an interpolation is unknown."""
    if name not in known:
        raise UsageError(f"{flag} {name} is unknown. It is one of {', '.join(known)}.")


def check_aa(aa: str, form: Format, interpolation: str) -> None:
    """Raise UsageError if the images are grey, Pillow cannot turn them, or timm would ignore a part of the text."""
    if form.channels != 3:
        raise UsageError(f"--aa {aa} changes colours, but the images are grey. Leave it out.")
    if interpolation in RESIZES_ONLY:
        raise UsageError(
            f"--aa {aa} turns images, which Pillow cannot do with interpolation {interpolation}. Give "
            "--train-interpolation bicubic."
        )
    for part in aa.split("-")[1:]:
        if not any(c.isdigit() for c in part) and not (part.startswith("t") and aa.startswith("rand-")):
            raise UsageError(
                f"--aa {aa}: timm would ignore {part!r}, which has no number. Write such as m9 or mstd0.5."
            )


def training_transform(form: Format, augmentation: Augmentation) -> Chain:
    """Transform of training images.

    Raises:
        UsageError: timm does not understand a setting.
    """
    if not augmentation.random:
        return evaluation_transform(form)
    interpolation = augmentation.train_interpolation or form.interpolation
    check_interpolation("--train-interpolation", interpolation, (RANDOM, *INTERPOLATIONS))
    if augmentation.aa:
        check_aa(augmentation.aa, form, interpolation)
    for name, (low, high) in (("scale", augmentation.scale), ("ratio", augmentation.ratio)):
        if not 0 < low <= high:
            raise UsageError(f"--{name} {low} {high}: give two numbers above 0, the smaller one first.")
    try:
        transform = made_by_timm(
            "Augmentation",
            form,
            interpolation,
            is_training=True,
            scale=augmentation.scale,
            ratio=augmentation.ratio,
            hflip=augmentation.hflip,
            color_jitter=augmentation.color_jitter or None,
            auto_augment=augmentation.aa,
            re_prob=augmentation.reprob,
        )
    except (AssertionError, KeyError, ValueError, IndexError, TypeError) as error:
        given = {key: value for key, value in asdict(augmentation).items() if value != getattr(Augmentation(), key)}
        raise UsageError(
            f"timm does not understand these settings: {given}: {type(error).__name__}: {error}. "
            "--aa takes texts such as rand-m9-mstd0.5, augmix-m5-w4-d2 or original."
        ) from error
    shifts = []
    if augmentation.shift:
        crop = needed("torchvision.transforms", "Augmentation").RandomCrop
        shifts = [crop(form.side, padding=augmentation.shift, padding_mode="edge")]
    return Chain(MODES[form.channels], (transform, *shifts))


def evaluation_transform(form: Format) -> Chain:
    """Transform of test images, timm's for evaluation: resize, crop, normalise."""
    options = {"crop_pct": form.crop_pct, "crop_mode": form.crop_mode}
    return Chain(MODES[form.channels], (made_by_timm("Reading images", form, form.interpolation, **options),))


def made_by_timm(purpose: str, form: Format, interpolation: str, **options: Any) -> Transform:
    """timm's transform to a format, with its tensors on the CPU."""
    create = needed("timm.data", purpose).create_transform
    with torch.device("cpu"):
        made = create(form.shape, interpolation=interpolation, mean=form.mean, std=form.std, **options)
    for op in augmentations(made):
        if op.aug_fn.__name__ == "posterize":
            op.aug_fn = posterize
    return made


def augmentations(transform: Any) -> Iterator[Any]:
    """Operations of the RandAugment, AugMix or AutoAugment policies in timm's transform."""
    for step in transform.transforms:
        for ops in (getattr(step, "ops", ()), *getattr(step, "policy", ())):
            yield from (op for op in ops if hasattr(op, "aug_fn"))


def posterize(image: Any, bits: int, **unused: Any) -> Any:
    """The image with so many bits in each channel. timm asks for 0, a black image, which Pillow 13 refuses."""
    if bits >= 8:
        return image
    return image.point([value & (0xFF00 >> max(bits, 0)) & 0xFF for value in range(256)] * len(image.getbands()))


@dataclass(frozen=True)
class Chain:
    """Conversion to a PIL mode, followed by transforms in order."""

    mode: str
    transforms: tuple[Callable[[Any], Any], ...]

    @property
    def steps(self) -> Sequence[Any]:
        """Steps of timm's transform, the first of the transforms."""
        return self.transforms[0].transforms  # type: ignore[attr-defined]  # torchvision's Compose

    def __call__(self, image: Any) -> torch.Tensor:
        image = in_mode(image, self.mode)
        for transform in self.transforms:
            image = transform(image)
        return image


def in_mode(image: Any, mode: str) -> Any:
    """The PIL image in a mode; Pillow would copy one that is in it already, and cut numbers of 16 bits at 255.

    Raises:
        UsageError: it has 32 bits in a channel, whose range is unknown.
    """
    if image.mode in ("I", "F"):
        raise UsageError(
            f"An image of {image.width}×{image.height} pixels has 32 bits in a channel (Pillow's mode {image.mode}), "
            "and nothing says which number is white. Convert the images to 8 or 16 bits."
        )
    if image.mode.startswith("I;16"):
        image = pillow().fromarray((np.asarray(image) // 257).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)
