"""Sampler: the images of each batch, the same on every mesh, and the part that each data rank reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from math import ceil
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from autopar.errors import UsageError
from autopar.ir.units import plural

SEED_STRIDE = 1_000_003  # separates the shuffles of neighbouring seeds
SEED_MASK = 2**63 - 1


class Key(NamedTuple):
    """An image in an epoch; its augmentation depends on these and on the seed, and on nothing else.

    ``repeat`` counts the copies of an image under repeated augmentation.
    """

    epoch: int
    index: int
    repeat: int = 0


class EndlessSampler(Sampler[list[Key]]):
    """Batches of a sampler's next iteration and of all epochs after it, so that processes do not wait in between."""

    def __init__(self, sampler: PartSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[Key]]:
        ahead = copy(self.sampler)
        while True:
            yield from ahead
            ahead.start(ahead.epoch + 1)


class PartSampler(Sampler[list[Key]]):
    """Batch sampler of one data rank: part ``data_rank`` of ``data_size`` of each global batch.

    In training each epoch is shuffled by (seed, epoch), and the last samples that do not fill a batch are left out. In
    evaluation images come in order, each of them once. If the last batch cannot be shared evenly, its last image pads
    the parts, and `counts` says how many images of a part are real.

    With ``repeats`` (repeated augmentation), a batch has each of its images so many times, as under timm's
    RepeatAugSampler, and an epoch the first images of its order alone: as many samples as without. Copies lie as far
    apart as possible, so that replicas have different ones and Mixup's neighbours are different images.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        *,
        training: bool = True,
        seed: int = 0,
        group: int = 1,
        repeats: float = 1,
    ) -> None:
        """Start at epoch 1.

        Args:
            batch_size: samples of one accumulation step, over all data ranks.
            group: batches of one update (gradient accumulation); an epoch has a multiple of it.
            repeats: times that an image is in a training batch, on average.

        Raises:
            UsageError: repeats are below 1, there are too few samples, or data ranks cannot share a training batch
                evenly.
        """
        if repeats < 1:
            raise UsageError(f"Repeated augmentation repeats an image at least once; {repeats} is too few.")
        if training and batch_size % data_size:
            raise UsageError(
                f"A batch of {batch_size} cannot be shared by {data_size} data-parallel ranks in equal parts. "
                f"Use a multiple of {data_size}."
            )
        if training and num_samples < batch_size * group:
            parts = f" in {group} accumulation steps of {batch_size}" if group > 1 else ""
            fewer = " and fewer accumulation steps (--grad-accum-steps), which must divide it" if group > 1 else ""
            raise UsageError(
                f"A batch of {batch_size * group}{parts} is more than the {plural(num_samples, 'training image')}. Use "
                f"a batch (--batch-size) of {num_samples} or less{fewer}."
            )
        if num_samples == 0:
            raise UsageError("There is no image to evaluate on. Give at least one.")
        self.num_samples: int = num_samples
        self.batch_size: int = batch_size
        self.data_rank: int = data_rank
        self.data_size: int = data_size
        self.training: bool = training
        self.seed: int = seed
        self.repeats: float = repeats
        updates = num_samples // (batch_size * group)
        self.num_batches: int = updates * group if training else -(-num_samples // batch_size)
        self.epoch: int = 1
        self.first: int = 0

    def start(self, epoch: int, first: int = 0) -> None:
        """Set the epoch (from 1) and the first batch (from 0) of the next iteration."""
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        """Number of batches in the next iteration."""
        return self.num_batches - self.first

    def __iter__(self) -> Iterator[list[Key]]:
        return self.parts(self.order())

    def parts(self, order: Sequence[int]) -> Iterator[list[Key]]:
        """This rank's part of each batch.

        Args:
            order: images of the epoch, [samples].
        """
        copies = ceil(self.repeats)
        for batch in range(self.first, self.num_batches):
            places = range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.num_samples))
            whole = [place for first in range(copies) for place in places[first::copies]]
            size = -(-len(whole) // self.data_size)
            whole += whole[-1:] * (size * self.data_size - len(whole))
            yield [self.key(place, order) for place in whole[self.data_rank * size : (self.data_rank + 1) * size]]

    def key(self, place: int, order: Sequence[int]) -> Key:
        """The image at a place of the epoch."""
        number = int(place // self.repeats)
        return Key(self.epoch, order[number], place - ceil(number * self.repeats))

    def order(self) -> list[int]:
        """Indices of all images in the order of the epoch."""
        if not self.training:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed((self.seed * SEED_STRIDE + self.epoch) & SEED_MASK)
        return torch.randperm(self.num_samples, generator=generator, device="cpu").tolist()

    def counts(self) -> Iterator[int]:
        """Number of real images in this rank's part of each batch."""
        for batch in range(self.first, self.num_batches):
            whole = min(self.batch_size, self.num_samples - batch * self.batch_size)
            size = -(-whole // self.data_size)
            yield min(size, max(0, whole - self.data_rank * size))
