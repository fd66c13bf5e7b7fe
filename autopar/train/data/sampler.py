"""Sampler: the images of each batch, the same on every mesh, and the part that each data rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from autopar.errors import UsageError
from autopar.ir.units import plural

SEED_STRIDE = 1_000_003  # separates the shuffles of neighbouring seeds
SEED_MASK = 2**63 - 1


class Key(NamedTuple):
    """An image in an epoch; its augmentation depends on both and on the seed, and on nothing else."""

    epoch: int
    index: int


class PartSampler(Sampler[list[Key]]):
    """Batch sampler of one data rank: part ``data_rank`` of ``data_size`` of each global batch.

    In training each epoch is shuffled by (seed, epoch), and the last samples that do not fill a batch are left out. In
    evaluation images come in order, each of them once. If the last batch cannot be shared evenly, its last image pads
    the parts, and `counts` says how many images of a part are real.
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
    ) -> None:
        """Start at epoch 1.

        Args:
            batch_size: samples of one accumulation step, over all data ranks.
            group: batches of one update (gradient accumulation); an epoch has a multiple of it.

        Raises:
            UsageError: there are too few samples, or data ranks cannot share a training batch evenly.
        """
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
        self.num_samples, self.batch_size = num_samples, batch_size
        self.data_rank, self.data_size = data_rank, data_size
        self.training, self.seed = training, seed
        self.num_batches = num_samples // (batch_size * group) * group if training else -(-num_samples // batch_size)
        self.epoch, self.first = 1, 0

    def start(self, epoch: int, first: int = 0) -> None:
        """Set the epoch (from 1) and the first batch (from 0) of the next iteration."""
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        """Number of batches in the next iteration."""
        return self.num_batches - self.first

    def __iter__(self) -> Iterator[list[Key]]:
        order = self.order()
        for batch in range(self.first, self.num_batches):
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            size = -(-len(whole) // self.data_size)
            whole += whole[-1:] * (size * self.data_size - len(whole))
            own = whole[self.data_rank * size : (self.data_rank + 1) * size]
            yield [Key(self.epoch, index) for index in own]

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
