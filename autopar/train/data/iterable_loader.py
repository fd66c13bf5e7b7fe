"""Batches of a user's own iterable or DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autopar.errors import UsageError
from autopar.ir.pytree import leaves
from autopar.ir.units import of_type, plural
from autopar.train.data.loader import Batch


@dataclass(frozen=True)
class IterableLoader:
    """Batches (x, y) of a user's iterable, such as a DataLoader, which is iterated again in each epoch."""

    batches: Iterable[Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Batches of an epoch; see `Loader`.

        Raises:
            UsageError: a batch is no pair of inputs and targets.
        """
        del number
        for i, batch in enumerate(self.batches):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                holds = f" with {', '.join(map(repr, batch))}" if isinstance(batch, dict) else ""
                raise UsageError(
                    f"Batch {i} of the loader is {of_type(batch)}{holds}; it must be a pair (x, y), the model's input "
                    "and the target of loss_fn. Give the DataLoader a collate_fn that returns one."
                )
            if i >= first:
                x, y = batch
                yield Batch(x, y, num_samples(x, y, i))


def num_samples(x: Any, y: Any, number: int) -> int:
    """Samples of a batch: the first size of the first tensor among the targets, or else among the inputs.

    Raises:
        UsageError: batch ``number`` has no such tensor.
    """
    for leaf in leaves((y, x)):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise UsageError(
        f"Batch {number} of the loader has no tensor with samples: x is {of_type(x)}, y is {of_type(y)}. Give the "
        "DataLoader a collate_fn that returns tensors [batch, ...]."
    )


def check_equal_parts(loader: DataLoader[Any], num_batches: int, replicas: int) -> None:
    """Check that replicas can share each batch evenly, as far as the DataLoader says how large they are.

    Args:
        num_batches: batches of an epoch that are trained on.

    Raises:
        UsageError: they cannot.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or isinstance(loader.dataset, IterableDataset):
        return
    size, samples = batches.batch_size, len(batches.sampler)  # type: ignore[arg-type]
    last = samples - size * (num_batches - 1)
    if size % replicas:
        remedy = f"Use a batch_size that is a multiple of {replicas}"
    elif last < size and last % replicas:
        remedy = "Pass drop_last=True to the DataLoader"
    else:
        return
    smaller = f", the last one of {last}" if last < size else ""
    raise UsageError(
        f"The loader makes {plural(samples, 'sample')} into batches of {size}{smaller}, "
        f"and {replicas} data-parallel replicas train on equal parts of each. {remedy}."
    )
