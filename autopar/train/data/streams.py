"""Labelled images that are read in order: shards of WebDataset, streamed data sets of Hugging Face.

A stream is read in *lanes*, each a part of its shards. A training batch takes an equal share from every lane, the same
places of every batch from the same lane. Their number depends on shards and batch alone. A data rank, and each of its
loader processes, reads the lanes from which its places come, and decodes only its own images. So batches are the same
on every mesh, no image is decoded twice, and ranks read different shards as far as lanes allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.train.data.images import Encoded, Images
from autopar.train.data.sampler import Key, PartSampler

MAX_LANES = 64  # open files of one process, and shuffle buffers
EVEN_SHARDS = 16  # shards of a lane from which one more or less does not matter
SHUFFLE_BUFFER = 4096  # encoded images in the buffers of all lanes


@dataclass(frozen=True)
class Stream:
    """Training or test images of a data set that is read in order.

    Args:
        num_samples: images of an epoch.
        num_shards: parts that can be read independently of each other.
        read: images of shards, given by their indices, in order; raises UsageError.
    """

    num_samples: int
    num_shards: int
    read: Callable[[Sequence[int]], Iterator[Encoded]]

    def in_order(self) -> Iterator[Encoded]:
        """All images."""
        return self.read(range(self.num_shards))

    def lane(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterator[Encoded]:
        """Images of a lane in training, without end: after its last image, it is read again in another order.

        Raises:
            UsageError: there are none, or reading fails.
        """
        order = list(range(self.num_shards))
        random.Random(f"{seed} {epoch}").shuffle(order)
        for passes in count():
            generator, empty = random.Random(f"{seed} {epoch} {lane} {passes}"), True
            for sample in shuffled(self.read(order[lane::lanes]), max(SHUFFLE_BUFFER // lanes, 1), generator):
                yield sample
                empty = False
            if empty:
                raise UsageError(f"Part {lane + 1} of {lanes} of the training shards has no image. Give other shards.")


def shuffled(samples: Iterator[Encoded], size: int, generator: random.Random) -> Iterator[Encoded]:
    """Samples in the order in which they are drawn from a buffer of a size, which the next ones fill again."""
    buffer: list[Encoded] = []
    for sample in samples:
        buffer.append(sample)
        if len(buffer) == size:
            drawn = generator.randrange(size)
            buffer[drawn], buffer[-1] = buffer[-1], buffer[drawn]
            yield buffer.pop()
    generator.shuffle(buffer)
    yield from buffer


@dataclass(frozen=True)
class Parts:
    """Training and test images of a data set, each read by index or in order."""

    train: Images | Stream
    test: Images | Stream
    num_classes: int


def num_images(images: Images | Stream) -> int:
    """Images of an epoch."""
    return images.num_samples if isinstance(images, Stream) else len(images.labels)


def first(images: Images | Stream, count: int | None) -> Images | Stream:
    """The first ``count`` images; all of them if ``count`` is None or larger."""
    if count is None or count >= num_images(images):
        return images
    return replace(
        images, **{"num_samples": count} if isinstance(images, Stream) else {"labels": images.labels[:count]}
    )


def num_lanes(num_shards: int, batch_size: int) -> int:
    """Lanes of a training stream: as many as share a batch evenly, and shards about evenly."""
    lanes = range(min(num_shards, batch_size, MAX_LANES), 0, -1)
    even = (n for n in lanes if num_shards % n == 0 or num_shards // n >= EVEN_SHARDS)
    return next(n for n in even if batch_size % n == 0)


class StreamParts(IterableDataset[Any]):
    """This rank's part of each batch of a stream; of a loader process, its share of the part.

    In evaluation the stream is one lane in its own order, and its last image pads the last batch.
    """

    def __init__(
        self, stream: Stream, sampler: PartSampler, collate: Callable[[list[tuple[Key, Encoded]]], Any]
    ) -> None:
        """Prepare; nothing is read.

        Args:
            sampler: part and position; its indices are places in the epoch.
            collate: makes a part of a batch.
        """
        self.stream, self.sampler, self.collate = stream, sampler, collate
        self.lanes = num_lanes(stream.num_shards, sampler.batch_size) if sampler.training else 1
        start = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.start: torch.Tensor = start.share_memory_()  # persistent processes read it too

    def set_start(self, epoch: int, first: int) -> None:
        """Set the epoch and its first batch for the next iteration."""
        self.start[0], self.start[1] = epoch, first

    def __iter__(self) -> Iterator[Any]:
        self.sampler.start(*self.start.tolist())
        process = get_worker_info()
        number, processes = (process.id, process.num_workers) if process is not None else (0, 1)
        readers: dict[int, Iterator[Encoded]] = {}
        try:
            for keys in self.sampler.parts(range(self.sampler.num_samples)):
                share = keys[len(keys) * number // processes : len(keys) * (number + 1) // processes]
                yield self.collate(list(self.read(share, readers)))
        except UsageError as error:
            yield Unreadable(str(error))

    def read(self, keys: Sequence[Key], readers: dict[int, Iterator[Encoded]]) -> Iterator[tuple[Key, Encoded]]:
        """The images at places of one batch, in order; the lanes' other images of the batch are skipped."""
        size = self.sampler.batch_size
        share = size // self.lanes
        for lane in dict.fromkeys(key.index % size // share for key in keys):
            if lane not in readers:
                readers[lane] = self.reader(lane, share)
            wanted = [key for key in keys if key.index % size // share == lane]
            places = {key.index % share for key in wanted}
            found = {i: sample for i, sample in enumerate(islice(readers[lane], share)) if i in places}
            if len(found) < len(places):
                raise UsageError(
                    f"The test images ended before the {plural(self.stream.num_samples, 'image')} that they should "
                    "have. Give their number (--val-num-samples), or leave it out."
                )
            yield from ((key, found[key.index % share]) for key in wanted)

    def reader(self, lane: int, share: int) -> Iterator[Encoded]:
        """Images of a lane from the first batch of this iteration on."""
        sampler = self.sampler
        if sampler.training:
            samples = self.stream.lane(lane, self.lanes, sampler.seed, sampler.epoch)
        else:
            samples = self.stream.in_order()
        return islice(samples, sampler.first * share, None)


class Unreadable(NamedTuple):
    """Stands for an image that a loader process could not read."""

    reason: str
