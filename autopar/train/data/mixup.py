"""timm's Mixup and CutMix, with the same draws and the same pairs on every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from autopar.errors import UsageError
from autopar.train.timm_optional import needed

STREAM = 0x4D69  # separates these draws from others with the same seed


@dataclass(frozen=True)
class Mixup:
    """Mixing of the images of a batch, with fields named as timm's flags.

    timm mixes a batch with its reverse, so that an image's partner depends on how the batch is cut. Here neighbours are
    partners: image 2i and image 2i + 1.
    """

    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    smoothing: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0 or self.mixup == self.cutmix == 0:
            raise UsageError(f"Mixup {self.mixup} and CutMix {self.cutmix} must be at least 0, and one of them above.")

    def __call__(self, x: torch.Tensor, target: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixed images [batch, channels, height, width] and soft targets [batch, classes].

        All parts of a step have the same share and box.

        Args:
            x: images [batch, channels, height, width]; may be on the meta device if only targets are needed.
            target: classes [batch].
            step: updates before this one.
        """
        mix = needed("timm.data", "Mixup").Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.prob,
            switch_prob=self.switch_prob,
            mode="batch",
            label_smoothing=self.smoothing,
            num_classes=self.num_classes,
        )
        order = outside_in(len(x))
        with numpy_seeded(self.seed, STREAM, step):
            mixed, soft = mix(x[order], target[order])
        back = order.argsort()
        return mixed[back], soft[back]


def outside_in(count: int) -> torch.Tensor:
    """An order, [count], that puts sample 2i as far from the start as its neighbour 2i + 1 is from the end."""
    order = torch.arange(count, device="cpu")
    return torch.cat([order[::2], order[1::2].flip(0)])


@contextmanager
def numpy_seeded(*seed: int) -> Iterator[None]:
    """Within ``with``, numpy's global generator draws from this seed; its state is restored afterwards."""
    before = np.random.get_state()
    np.random.seed([part & 0xFFFFFFFF for part in seed])
    try:
        yield
    finally:
        np.random.set_state(before)


def check_even(batch_size: int, parts: int) -> None:
    """Refuse batches whose parts do not consist of pairs.

    Args:
        batch_size: samples of one accumulation step.
        parts: data-parallel ranks, each of which reads a part.

    Raises:
        UsageError: a part has an odd size; says which batch sizes are possible.
    """
    if batch_size % (2 * parts):
        shared = f", shared by {parts} data-parallel ranks," if parts > 1 else ""
        raise UsageError(
            f"Mixup and CutMix mix images in pairs: a batch of {batch_size}{shared} leaves an image alone. "
            f"Use a multiple of {2 * parts} per accumulation step, or leave --mixup and --cutmix out."
        )
