"""Requirements of a run on a data set."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from autopar.errors import UsageError


@dataclass(frozen=True)
class Selection:
    """Parts of a data set that its library reads (hf:, wds:), named as timm's flags; None takes what is usual.

    Args:
        train_split, val_split: names of splits (hf), or the shards of the test images (wds).
        input_key, target_key: columns (hf) or file suffixes (wds) of image and class.
        num_classes: number of classes.
        streaming: whether a data set of Hugging Face is streamed instead of read by index.
    """

    train_split: str | None = None
    val_split: str | None = None
    input_key: str | None = None
    target_key: str | None = None
    num_classes: int | None = None
    streaming: bool = False


@dataclass(frozen=True)
class Wanted:
    """Requirements of a run on a data set.

    Args:
        side: height and width of the images, pixel.
        seed: decides which digits are test images, and the pixels of synthetic images.
        folder: where the files are.
        download: fetch the files into the folder.
        num_train, num_test: number of images; the first ones of larger data sets are taken. Of a training set that is
            streamed, the length of an epoch.
        mean, std, interpolation, crop_pct, crop_mode: as in `autopar.train.data.transforms.Format`; None takes what is
            usual for the data set.
        selection: what is read of a data set.

    Raises:
        UsageError: a standard deviation is not above 0.
    """

    side: int
    channels: int = 3
    seed: int = 0
    folder: Path | None = None
    download: bool = False
    num_train: int | None = None
    num_test: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    selection: Selection = Selection()

    def __post_init__(self) -> None:
        if self.std is not None and not all(0 < value < inf for value in self.std):
            text = " ".join(f"{value:g}" for value in self.std)
            raise UsageError(
                f"The standard deviation of pixels is {text}; pixels are divided by it: it must be above 0, and finite."
            )
