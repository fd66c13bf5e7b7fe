"""Batches for one rank: images by torch's DataLoader if the rank reads inputs, else labels and shapes only."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from autopar.api.model import ParallelModel
from autopar.errors import UnreadableDataError, UsageError
from autopar.train.data.datasets import Data
from autopar.train.data.device_images import DeviceBatches, DeviceTransform
from autopar.train.data.device_samples import EncodedSamples, Preparation, check_device_images, collate_prepared
from autopar.train.data.images import EncodedImages, Images
from autopar.train.data.mixup import Mixup, check_even
from autopar.train.data.sampler import EndlessSampler, PartSampler
from autopar.train.data.samples import ImageSamples, collate, collate_encoded, collate_labels, without_images
from autopar.train.data.streams import Stream, StreamParts, Unreadable, num_images
from autopar.train.data.transforms import Augmentation, Chain, Format, evaluation_transform, training_transform


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
        images: Images | Stream,
        sampler: PartSampler,
        transform: Chain,
        form: Format,
        reads: bool = True,
        num_workers: int = 0,
        *,
        random_seed: int | None = None,
        mixup: Mixup | None = None,
        group: int = 1,
        channels_last: bool = False,
        device: torch.device | None = None,
        decode: bool = False,
    ) -> None:
        """Prepare; no process starts yet.

        Args:
            transform: from a PIL image to a tensor of ``form``.
            reads: whether this rank needs images; otherwise its batches hold tensors on the meta device.
            num_workers: processes that read images; 0 reads in this one.
            random_seed: seed of a random transform; None if it is not random.
            group: batches of one update, which are mixed with the same share and box.
            channels_last: whether batches of images are in that memory format.
            device: GPU on which images are made after Pillow's crop, and stay; None makes them in the processes.
            decode: whether the device also decodes them.

        Raises:
            UsageError: torchvision cannot decode on the device.
        """
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.sampler: PartSampler = sampler
        self.mixup: Mixup | None = mixup
        self.group: int = group
        self.parts: Callable[[], Iterator[Any]]
        self.stream: StreamParts | None = None
        self.device_batches: DeviceBatches | None = None
        self.endless: bool = False  # whether parts go on with the next epoch, which processes make while this one ends
        self.ahead: tuple[tuple[int, int], Iterator[Any]] | None = None  # its number and first batch, and its parts
        options: dict[str, Any] = {
            "worker_init_fn": IgnoreSignals(),
            "generator": torch.Generator(),  # otherwise it draws from the default generator, which is the user's
        }
        images_of: Callable[[Any], Any] = transform  # of a PIL image
        collated: Callable[[Any], Any] = partial(collate, memory_format=layout)
        make: Callable[[Any], Any] | None = None
        if device is not None and reads and (preparation := Preparation.of(transform, form, random_seed)):
            self.device_batches = DeviceBatches(DeviceTransform(transform, form, device, layout, decode))
            if decode:
                make = preparation.collate_encoded
            else:
                images_of, collated = preparation, collate_prepared
        join = self.device_batches.batches if self.device_batches is not None else partial(joined, layout=layout)
        if isinstance(images, Stream):
            num_workers = min(num_workers, sampler.batch_size // sampler.data_size) if reads else 0
            if not reads:
                make = partial(collate_labels, shape=form.shape, layout=layout)
            elif make is None:
                make = partial(collate_encoded, transform=images_of, seed=random_seed, collate=collated)
            self.stream = StreamParts(images, sampler, make)
            source = DataLoader(
                self.stream, batch_size=None, collate_fn=as_it_is, num_workers=num_workers,
                persistent_workers=num_workers > 0, **options,
            )  # fmt: skip
            self.parts = lambda: join(batch_shares(source, max(num_workers, 1)))
        elif reads:
            samples: Any = ImageSamples(images, images_of, random_seed)
            if make is not None:
                assert isinstance(images, EncodedImages)
                samples, collated = EncodedSamples(images), make
            self.endless = num_workers > 0 and sampler.training
            source = DataLoader(
                samples, batch_sampler=EndlessSampler(sampler) if self.endless else sampler, collate_fn=collated,
                num_workers=num_workers, persistent_workers=num_workers > 0,
                pin_memory=torch.cuda.is_available() and make is None, **options,
            )  # fmt: skip
            self.parts = lambda: join(batch_shares(source, 1))
        else:
            self.parts = partial(label_parts, images, sampler, form.shape, layout)

    def __len__(self) -> int:
        return self.sampler.num_batches

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Batches of an epoch; see `Loader`.

        Raises:
            UnreadableDataError: an image cannot be read.
        """
        self.sampler.start(number, first)
        if self.stream is not None:
            self.stream.set_start(number, first)
        ahead, self.ahead = self.ahead, None
        parts = ahead[1] if ahead is not None and ahead[0] == (number, first) else None
        del ahead  # which ends those of another epoch
        if parts is None:
            parts = self.parts()
        for batch, count in enumerate(self.sampler.counts(), first):
            part = next(parts)  # zip would keep it, and its memory on a GPU, until the next one
            if isinstance(part, Unreadable):
                raise UnreadableDataError(part.reason)
            x, y = part
            del part
            update = ((number - 1) * len(self) + batch) // self.group
            if self.device_batches is not None:
                x, y = self.device_batches.mixed(self.mixup, x, y, update)
            elif self.mixup is not None:
                x, y = self.mixup(x, y, update)
            made = [Batch(x, y, count)]
            del x, y
            if self.endless and batch == len(self) - 1:
                self.ahead = (number + 1, 0), parts
            yield made.pop()


def label_parts(
    images: Images, sampler: PartSampler, shape: tuple[int, ...], layout: torch.memory_format
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches with images on the meta device and real labels."""
    for keys in sampler:
        yield without_images([int(images.labels[key.index]) for key in keys], shape, layout)


def as_it_is(part: Any) -> Any:
    return part


def batch_shares(source: DataLoader[Any], processes: int) -> Iterator[list[Any] | Unreadable]:
    """Shares of each batch, of which each loader process makes one; the first unreadable share stands for all."""
    shares = made_on_cpu(source)
    while batch := list(islice(shares, processes)):
        bad = next((share for share in batch if isinstance(share, Unreadable)), None)
        if bad is not None:
            yield bad
            return
        yield [share for share in batch if share is not None]


def joined(batches: Iterator[list[Any] | Unreadable], layout: torch.memory_format) -> Iterator[Any]:
    """Batches of a stream from their shares."""
    for batch in batches:
        if isinstance(batch, Unreadable):
            yield batch
            return
        images, labels = zip(*batch)
        if len(images) == 1:
            yield images[0], labels[0]
            continue
        shape = (sum(map(len, images)), *images[0].shape[1:])
        x = torch.empty(shape, memory_format=layout, device="cpu", pin_memory=torch.cuda.is_available())
        yield torch.cat(images, out=x), torch.cat(labels)


def made_on_cpu(source: DataLoader[Any]) -> Iterator[Any]:
    """Batches of a loader, which neither its draws nor the transforms make on the caller's default device."""
    with torch.device("cpu"):
        batches = iter(source)
    while True:
        try:
            with torch.device("cpu"):
                batch = next(batches)
        except StopIteration:
            return
        yield batch  # None is the share of a process that has no image of a small last batch


class TimedBatches:
    """Batches of an epoch, and the seconds in which they were waited for."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches, self.waited, self.start = batches, 0.0, perf_counter()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = perf_counter()
        batch = next(self.batches)
        self.waited += perf_counter() - start
        return batch

    def take_waited(self) -> float:
        """Seconds of waiting since the previous call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def elapsed(self) -> float:
        """Seconds since the start of the epoch."""
        return perf_counter() - self.start


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
    aug_repeats: float = 1,
    decode_on_gpu: bool = False,
) -> PartLoader:
    """Loader of this rank's part of the training images, shuffled and augmented identically on every mesh.

    A rank's GPU resizes and finishes them, which would take processors as long as decoding, and batches stay there.

    Args:
        batch_size: samples of one update, over all devices and accumulation steps.
        augmentation: random changes of the images; by default the usual ones for the data.
        channels_last: whether images are in that memory format.
        aug_repeats: times that an image is in a batch, with another augmentation each time (repeated augmentation).
        decode_on_gpu: whether the GPU also decodes and crops them.

    Raises:
        UsageError: the batch is too large, the data ranks cannot share it, a stream should repeat images, or the GPU
            cannot make them.
    """
    size = micro_batch(batch_size, grad_accum_steps)
    if mixup is not None:
        check_even(size, pm.data_size)
    augmentation = data.augmentation if augmentation is None else augmentation
    transform = check_augmentation(data, augmentation, aug_repeats)
    if decode_on_gpu:
        check_device_images(data.train, data.form, augmentation)
    sampler = PartSampler(
        num_images(data.train), size, pm.data_rank, pm.data_size, seed=seed, group=grad_accum_steps,
        repeats=aug_repeats,
    )  # fmt: skip
    return PartLoader(
        data.train,
        sampler,
        transform,
        data.form,
        pm.needs_inputs,
        num_workers,
        random_seed=seed if augmentation.random else None,
        mixup=mixup,
        group=grad_accum_steps,
        channels_last=channels_last,
        device=images_device(pm, decode_on_gpu),
        decode=decode_on_gpu,
    )


def images_device(pm: ParallelModel, decodes: bool) -> torch.device | None:
    """GPU on which this process makes images: its rank's; of several in a plain script the first, if it decodes."""
    device = torch.device(pm.machine.device_of(0))
    has_rank = pm.machine.launched is not None or pm.plan.mesh.devices == 1
    return device if decodes or (has_rank and device.type == "cuda") else None


def check_augmentation(data: Data, augmentation: Augmentation, repeats: float) -> Chain:
    """Transform of training images.

    Raises:
        UsageError: timm does not understand a setting, or a stream should repeat images.
    """
    if repeats > 1 and isinstance(data.train, Stream):
        raise UsageError(f"Data set {data.name!r} is streamed, and repeats no images. Leave --aug-repeats out.")
    return training_transform(data.form, augmentation)


def evaluation_loader(
    data: Data,
    batch_size: int,
    pm: ParallelModel | None = None,
    num_workers: int = 0,
    channels_last: bool = False,
    decode_on_gpu: bool = False,
) -> PartLoader:
    """Loader of this rank's part of the test images, in order; of all of them without a parallel model.

    Args:
        decode_on_gpu: as for `training_loader`; needs a parallel model.

    Raises:
        UsageError: the GPU cannot make them.
    """
    rank, size, reads = (pm.data_rank, pm.data_size, pm.needs_inputs) if pm is not None else (0, 1, True)
    if decode_on_gpu:
        check_device_images(data.test, data.form, Augmentation())
    sampler = PartSampler(num_images(data.test), batch_size, rank, size, training=False)
    transform = evaluation_transform(data.form)
    device = images_device(pm, decode_on_gpu) if pm is not None else None
    return PartLoader(
        data.test, sampler, transform, data.form, reads, num_workers, channels_last=channels_last, device=device,
        decode=decode_on_gpu,
    )  # fmt: skip


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
