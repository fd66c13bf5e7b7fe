"""Images to train on, as tensors in memory."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from autopar.errors import UsageError

TEST_SHARE = 0.2
DIGITS_LARGEST = 16.0  # of a pixel


@dataclass(frozen=True)
class Data:
    """A data set split in two. Images are float32 [samples, channels, side, side], labels int64 [samples]."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    num_classes: int


def load_data(name: str, side: int, channels: int, seed: int) -> Data:
    """A data set at an image size, normalised by its training part; the split depends on the seed alone.

    Raises:
        UsageError: unknown name, or a library that it needs is missing.
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"No data set is named {name!r}.{hint} There is {', '.join(DATASETS)}.")
    images, labels = DATASETS[name]()
    test = stratified(labels, TEST_SHARE, seed)
    images = F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    mean, deviation = images[~test].mean(), images[~test].std()
    images = ((images - mean) / deviation).expand(-1, channels, -1, -1).contiguous()
    return Data(images[~test], labels[~test], images[test], labels[test], int(labels.max()) + 1)


def stratified(labels: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """A mask that takes this share of each class, at random by the seed."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        mask[members[order[: round(share * len(members))]]] = True
    return mask


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits: 1,797 grey images of 8×8 from the UCI repository, in [0, 1], and their labels."""
    try:
        datasets: Any = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise UsageError("Data set 'digits' needs scikit-learn: pip install 'autopar[train]'.") from error
    loaded = datasets.load_digits()
    images = torch.from_numpy(loaded.images).float()[:, None] / DIGITS_LARGEST
    return images, torch.from_numpy(loaded.target).long()


DATASETS: Mapping[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {"digits": digits}
