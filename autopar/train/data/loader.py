"""Batches for one rank: images by torch's DataLoader if the rank reads inputs, else labels and shapes only."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from autopar.api.model import ParallelModel
from autopar.errors import UsageError
from autopar.ir.pytree import leaves
from autopar.ir.units import of_type, plural
from autopar.train.data.datasets import Data
from autopar.train.data.images import Images
from autopar.train.data.mixup import Mixup, check_even
from autopar.train.data.sampler import Key, PartSampler
from autopar.train.data.transforms import Augmentation, Transform, evaluation_transform, training_transform


class Batch(NamedTuple):
    """A rank's part of a batch: inputs, targets, and the number of real samples; samples after these are padding."""

    x: Any
    y: Any
    count: int


@runtime_checkable
class Loader(Protocol):
    """Source of batches for a `autopar.train.Trainer`."""

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        ...

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Batches of an epoch, starting at batch ``first``; epochs count from 1, batches from 0."""
        ...


class Unreadable(NamedTuple):
    """Stands for an image that a loader process could not read."""

    reason: str


@dataclass(frozen=True)
class ImageSamples(Dataset[Any]):
    """Images as tensors with labels, by key; random transforms depend on seed and key alone."""

    images: Images
    transform: Transform
    seed: int
    random: bool

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int] | Unreadable:
        try:
            image = self.images.image(key.index)
        except UsageError as error:
            return Unreadable(str(error))
        label = int(self.images.labels[key.index])
        if not self.random:
            return self.transform(image), label
        with seeded(self.seed, *key):
            return self.transform(image), label


@contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Within ``with``, Python, numpy and torch draw from this seed on CPU; their states are restored afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draws = np.random.SeedSequence([part & 0xFFFFFFFF for part in seed]).generate_state(3)
    random.seed(int(draws[0]))
    np.random.seed(draws[1])
    torch.default_generator.manual_seed(int(draws[2]))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def collate(
    samples: Sequence[tuple[torch.Tensor, int] | Unreadable], memory_format: torch.memory_format
) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
    """Samples as a batch, images [batch, channels, height, width] and labels [batch]; or the first unreadable one."""
    good = [s for s in samples if not isinstance(s, Unreadable)]
    if len(good) < len(samples):
        return next(s for s in samples if isinstance(s, Unreadable))
    images = torch.stack([image for image, _ in good]).contiguous(memory_format=memory_format)
    return images, torch.tensor([label for _, label in good], device="cpu")


@dataclass(frozen=True)
class IgnoreSignals:
    """Start of a loader process: it ignores Ctrl-C, and SIGTERM of others than the training process.

    Both may be sent to all processes of a run, and the training process may need another batch before it ends.
    """

    then: Callable[[int], Any] | None = None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            threading.Thread(target=end_on_sigterm_of, args=(os.getppid(),), daemon=True).start()
        if self.then is not None:
            self.then(worker)


def end_on_sigterm_of(parent: int) -> None:
    """Wait for SIGTERM, and end this process once it comes from ``parent``: multiprocessing sends it at its exit."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class PartLoader:
    """One rank's part of all batches of a data set."""

    def __init__(
        self,
        samples: ImageSamples,
        sampler: PartSampler,
        shape: tuple[int, ...],
        reads: bool,
        num_workers: int = 0,
        mixup: Mixup | None = None,
        group: int = 1,
        channels_last: bool = False,
    ) -> None:
        """Prepare; no process starts yet.

        Args:
            shape: shape of an image's tensor.
            reads: whether this rank needs images; otherwise its batches hold tensors on the meta device.
            num_workers: processes that read images; 0 reads in this one.
            group: batches of one update, which are mixed with the same share and box.
            channels_last: whether batches of images are in that memory format.
        """
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.sampler, self.shape, self.mixup, self.group = sampler, shape, mixup, group
        self.labels = samples.images.labels
        self.source: DataLoader[Any] | None = None
        if reads:
            self.source = DataLoader(
                samples,
                batch_sampler=sampler,
                num_workers=num_workers,
                persistent_workers=num_workers > 0,
                worker_init_fn=IgnoreSignals(),
                collate_fn=partial(collate, memory_format=self.memory_format),
                pin_memory=torch.cuda.is_available(),
                generator=torch.Generator(),  # otherwise it draws from the default generator, which is the user's
            )

    def __len__(self) -> int:
        return self.sampler.num_batches

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Batches of an epoch; see `Loader`.

        Raises:
            UsageError: an image cannot be read.
        """
        self.sampler.start(number, first)
        parts = self.label_batches() if self.source is None else made_on_cpu(self.source)
        for batch, (part, count) in enumerate(zip(parts, self.sampler.counts(), strict=True), first):
            if isinstance(part, Unreadable):
                raise UsageError(part.reason)
            x, y = part
            if self.mixup is not None:
                update = ((number - 1) * len(self) + batch) // self.group
                x, y = self.mixup(x, y, update)
            yield Batch(x, y, count)

    def label_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches with images on the meta device and real labels."""
        for keys in self.sampler:
            x = torch.empty(len(keys), *self.shape, device="meta", memory_format=self.memory_format)
            yield x, torch.tensor([int(self.labels[key.index]) for key in keys], device="cpu")


def made_on_cpu(source: DataLoader[Any]) -> Iterator[Any]:
    """Batches of a loader, which neither its draws nor the transforms make on the caller's default device."""
    with torch.device("cpu"):
        batches = iter(source)
    while True:
        with torch.device("cpu"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


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


def training_loader(
    pm: ParallelModel,
    data: Data,
    batch_size: int,
    *,
    seed: int = 0,
    augmentation: Augmentation | None = None,
    grad_accum_steps: int = 1,
    mixup: Mixup | None = None,
    num_workers: int = 0,
    channels_last: bool = False,
) -> PartLoader:
    """Loader of this rank's part of the training images, shuffled and augmented identically on every mesh.

    Args:
        batch_size: samples of one update, over all devices and accumulation steps.
        augmentation: random changes of the images; by default the usual ones for the data.
        channels_last: whether images are in that memory format.

    Raises:
        UsageError: the batch is too large, or the data ranks cannot share it.
    """
    size = micro_batch(batch_size, grad_accum_steps)
    if mixup is not None:
        check_even(size, pm.data_size)
    augmentation = data.augmentation if augmentation is None else augmentation
    sampler = PartSampler(len(data.train.labels), size, pm.data_rank, pm.data_size, seed=seed, group=grad_accum_steps)
    samples = ImageSamples(data.train, training_transform(data.form, augmentation), seed, augmentation.random)
    return PartLoader(
        samples, sampler, data.form.shape, pm.needs_inputs, num_workers, mixup, grad_accum_steps, channels_last
    )


def evaluation_loader(
    data: Data, batch_size: int, pm: ParallelModel | None = None, num_workers: int = 0, channels_last: bool = False
) -> PartLoader:
    """Loader of this rank's part of the test images, in order; of all of them without a parallel model."""
    rank, size, reads = (pm.data_rank, pm.data_size, pm.needs_inputs) if pm is not None else (0, 1, True)
    sampler = PartSampler(len(data.test.labels), batch_size, rank, size, training=False)
    samples = ImageSamples(data.test, evaluation_transform(data.form), 0, random=False)
    return PartLoader(samples, sampler, data.form.shape, reads, num_workers, channels_last=channels_last)


def micro_batch(batch_size: int, grad_accum_steps: int) -> int:
    """Samples of one accumulation step.

    Raises:
        UsageError: the batch is no multiple of the steps.
    """
    if batch_size % grad_accum_steps:
        raise UsageError(
            f"A batch of {batch_size} cannot be accumulated in {grad_accum_steps} equal steps. "
            f"Use a multiple of {grad_accum_steps}."
        )
    return batch_size // grad_accum_steps
