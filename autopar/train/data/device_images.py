"""Batches made on a device, from images and draws of loader processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any
from warnings import warn

import numpy as np
import torch

from autopar.errors import DecodingWarning, UsageError, caller_level
from autopar.ir.units import plural
from autopar.train.data.device_samples import FLAG, Share
from autopar.train.data.images import Encoded
from autopar.train.data.mixup import Mixup
from autopar.train.data.streams import Unreadable
from autopar.train.data.transforms import MODES, Chain, Format
from autopar.train.timm_optional import needed

DECODED_BYTES = 1 << 28  # pixels that are decoded at once, except of one larger image

# Environment variable that CUDA reads when it starts: hardware queues of a process. With the default, decoding waited
# for whole training steps: ViT-B took 93 ms an update, with 32 queues 76 (256 images, H100, torch 2.11).
QUEUES, DEFAULT_QUEUES, ENOUGH_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8, 32


def decode_beside_steps() -> None:
    """Have CUDA, before it starts in this process, decode while it trains, unless the environment says otherwise."""
    os.environ.setdefault(QUEUES, str(ENOUGH_QUEUES))


def warn_of_few_queues(device: torch.device) -> None:
    text = os.environ.get(QUEUES, "")
    queues = int(text) if text.isdecimal() else DEFAULT_QUEUES
    if device.type == "cuda" and queues < ENOUGH_QUEUES:
        advice = f"Set {QUEUES}={ENOUGH_QUEUES} in the environment before CUDA starts."
        warn(f"Decoding on {device} waits for training steps. {advice}", DecodingWarning, stacklevel=caller_level())


class DeviceTransform:
    """Part of timm's transform that runs on a device, for whole batches.

    Args:
        chain: timm's transform.
        decodes: whether the device decodes JPEGs; otherwise there are none.
    """

    def __init__(
        self, chain: Chain, form: Format, device: torch.device, layout: torch.memory_format, decodes: bool
    ) -> None:
        """Prepare.

        Raises:
            UsageError: the device's decoder does not work here.
        """
        from autopar.train.data import image_kernels  # Triton, which is part of torch for CUDA

        self.form, self.device, self.layout, self.decodes = form, device, layout, decodes
        self.remedy = f"Leave {FLAG} out." if decodes else "Plan with less --memory."
        self.kernels, self.values = image_kernels, values_of_levels(chain, form).to(device)
        if not decodes:
            return
        warn_of_few_queues(device)
        self.io = needed("torchvision.io", FLAG)
        self.mode = self.io.ImageReadMode.RGB if form.channels == 3 else self.io.ImageReadMode.GRAY
        try:
            probe = self.io.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8, device="cpu"))
            self.io.decode_jpeg([probe], device=self.device)
        except RuntimeError as error:
            raise UsageError(
                f"torchvision cannot decode JPEGs on {self.device}: {error}. Leave {FLAG} out, or install a "
                "torchvision with nvJPEG."
            ) from error

    def __call__(self, shares: Sequence[Share]) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch of the images of all loader processes: x on the device, labels [batch].

        Raises:
            UsageError: an image cannot be decoded; names it.
        """
        records = np.concatenate([share.records for share in shares])
        shape = (len(records), *self.form.shape)
        x = torch.empty(shape, dtype=self.values.dtype, device=self.device, memory_format=self.layout)
        if self.decodes:
            self.decode(shares, records, x)
        else:
            contents = [share.content.to(self.device, non_blocking=True) for share in shares]
            sizes = [share.records["num_bytes"] for share in shares]
            starts = [own.data_ptr() + size.cumsum() - size for own, size in zip(contents, sizes, strict=True)]
            strides = np.ones((len(records), 3), np.int64) * [0, self.form.channels, 1]
            strides[:, 0] = records["size"][:, 1] * self.form.channels
            self.finish(np.concatenate(starts), strides, records, x)
        return x, torch.cat([share.labels for share in shares])

    def decode(self, shares: Sequence[Share], records: np.ndarray, out: torch.Tensor) -> None:
        """Write a batch of which JPEGs are decoded here."""
        names = [name for share in shares for name in share.names]
        contents = [part for share in shares for part in share.content.split(share.records["num_bytes"].tolist())]
        for group in groups((records["size"].prod(1) * self.form.channels).tolist()):
            if self.device.type == "cuda":  # the decoder's stream does not wait for work on memory that it gets again
                torch.cuda.current_stream(self.device).synchronize()
            images = self.decoded(contents[group], records[group], names[group])
            for image, size, name in zip(images, records[group]["size"].tolist(), names[group], strict=True):
                if list(image.shape[1:]) != size:  # kernels read pixels by address
                    found, said = ("×".join(map(str, sides)) for sides in (image.shape[1:], size))
                    raise UsageError(f"Cannot read image {name}: it has {found} pixels, its header says {said}.")
            strides = np.array([image.stride() for image in images])[:, [1, 2, 0]]
            self.finish(np.array([image.data_ptr() for image in images]), strides, records[group], out[group])

    def finish(self, addresses: np.ndarray, strides: np.ndarray, records: np.ndarray, out: torch.Tensor) -> None:
        """Write images, which are on the device, as the draws say.

        Args:
            addresses: of their first bytes.
            strides: bytes from one row, pixel and channel to the next, [images, 3].
        """
        rows = table_of(addresses, strides, records)
        table = torch.from_numpy(rows).to(self.device)
        shape = (len(records), *self.form.shape)
        levels = torch.empty(shape, dtype=torch.uint8, device=self.device)
        height, total = max(1, int(rows[:, 0].max())), int(rows[:, 0].sum())
        self.kernels.resize(table, int(rows[:, -1].max()), height, total, levels)
        factors = torch.tensor(records["factors"], device=self.device) if (records["kinds"] >= 0).any() else None
        self.kernels.finish(table, factors, levels, self.values, out)

    def decoded(
        self, contents: Sequence[torch.Tensor], records: np.ndarray, names: Sequence[str]
    ) -> list[torch.Tensor]:
        """Images on the device, uint8 [channels, height, width] of any strides."""
        chosen = np.flatnonzero(records["jpeg"]).tolist()
        jpegs = iter(self.decoded_jpegs([contents[n] for n in chosen], [names[n] for n in chosen]))
        return [
            next(jpegs) if jpeg else content.to(self.device).view(height, width, self.form.channels).permute(2, 0, 1)
            for content, jpeg, (height, width) in zip(contents, records["jpeg"], records["size"].tolist(), strict=True)
        ]

    def decoded_jpegs(self, jpegs: list[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
        """JPEGs on the device. Those that the device's decoder refuses are decoded by Pillow, or named in its error."""
        if not jpegs:
            return []
        try:
            return self.io.decode_jpeg(jpegs, mode=self.mode, device=self.device)
        except RuntimeError as error:  # of all images, one of which it refuses; torchvision changes the types of others
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            if len(jpegs) > 1:
                return [self.decoded_jpegs([jpeg], [name])[0] for jpeg, name in zip(jpegs, names, strict=True)]
        image = Encoded(jpegs[0].numpy().tobytes(), 0, names[0]).decoded().convert(MODES[self.form.channels])
        pixels = torch.from_numpy(np.array(image)).to(self.device)
        return [pixels.view(*pixels.shape[:2], -1).permute(2, 0, 1)]


def values_of_levels(chain: Chain, form: Format) -> torch.Tensor:
    """Values that timm's transform makes of the levels 0 to 255, [channels, 256]."""
    theirs = needed("torchvision.transforms", "Reading images")
    levels: Any = np.arange(256, dtype=np.uint8)[None, :, None].repeat(form.channels, 2)
    with torch.device("cpu"):
        for step in chain.steps:
            if isinstance(step, theirs.ToTensor | theirs.Normalize):
                levels = step(levels)
    return levels[:, 0].contiguous()


def table_of(addresses: np.ndarray, strides: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Table of `autopar.train.data.image_kernels`, int64 [images, columns]."""
    crop, resized = records["crop"], records["resized"]
    address = addresses + (crop[:, :2] * strides[:, :2]).sum(1)
    turned = heights_first(crop[:, 2:], resized)  # kernels resize widths first
    order = np.where(turned[:, None], [1, 0], [0, 1])
    pairs = [np.take_along_axis(pair, order, 1) for pair in (crop[:, 2:], resized, records["first"], strides[:, :2])]
    columns = [*pairs[:3], records["cubic"], address, pairs[3], strides[:, 2], records["flip"], records["kinds"]]
    heights = pairs[0][:, 0]
    columns += [records["erased"], turned, heights.cumsum() - heights, taps(records)]
    return np.column_stack(columns).astype(np.int64)


def heights_first(sizes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Whether Pillow resizes height before width, of images of sizes [images, 2]; each direction rounds."""
    by_shrinkage, by_ratio = pillow_order()
    height, width = (sizes - wanted).T
    shrinks = by_shrinkage & (height > 2 * width) | by_ratio & (sizes[:, 0] > 100 * sizes[:, 1])
    return shrinks & (height > 0)


@cache
def pillow_order() -> tuple[bool, bool]:
    """Whether Pillow resizes height before width if it shrinks over twice as much, and if it is over 100 widths.

    Version 13.0 does the former, 12.2 and 12.3 the latter, 10.4 to 12.0 neither. An image of each kind is resized.
    """
    pillow = needed("PIL.Image", "Reading images", "pillow")
    pixels = np.random.default_rng(0).integers(0, 256, (909, 9), np.uint8)

    def first(height: int, wanted: tuple[int, int]) -> bool:
        image, method = pillow.fromarray(pixels[:height]), pillow.Resampling.BILINEAR
        return image.resize(wanted, method) == image.resize((9, wanted[1]), method).resize(wanted, method)

    return first(90, (6, 30)), first(909, (4, 900))


def taps(records: np.ndarray) -> np.ndarray:
    """Most pixels of each image that Pillow's resize reads for one of the result in a direction."""
    scale = np.maximum(records["crop"][:, 2:] / records["resized"], 1.0)
    support = np.ceil(scale * np.where(records["cubic"], 2, 1)[:, None])
    return support.max(1) * 2 + 1


def groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of neighbours, of at most `DECODED_BYTES` in all or of one."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if total + size > DECODED_BYTES and i > first:
            yield slice(first, i)
            first, total = i, 0
        total += size
    yield slice(first, len(sizes))


class DeviceBatches:
    """Batches of a `DeviceTransform`, made one ahead, in a thread with a CUDA stream of its own."""

    def __init__(self, transform: DeviceTransform) -> None:
        self.transform, self.device = transform, transform.device
        cuda = self.device.type == "cuda"
        # Of a priority above that of training steps. Mixing does not wait for the next batch's decoding.
        self.making, self.mixing = [torch.cuda.Stream(self.device, -1) if cuda else None for _ in range(2)]

    def batches(self, shares: Iterator[list[Any] | Unreadable]) -> Iterator[Any]:
        """Batches of the shares of loader processes, in order. One is made ahead."""
        with ThreadPoolExecutor(1, "images") as thread:
            pending: deque[Future[Any]] = deque()
            for batch in shares:
                pending.append(thread.submit(self.made, batch))
                if len(pending) > 1:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def made(self, shares: list[Any] | Unreadable) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
        """Batch of shares, computed when this returns; the first image that cannot be read stands for all."""
        if isinstance(shares, Unreadable):
            return shares
        with ExitStack() as contexts:
            if self.making is not None:
                contexts.enter_context(torch.cuda.device(self.device))
                contexts.enter_context(torch.cuda.stream(self.making))
            try:
                batch = self.transform(shares)
            except UsageError as error:
                return Unreadable(str(error))
            except torch.OutOfMemoryError as error:
                count = plural(sum(len(share.labels) for share in shares), "image")
                reason = str(error).splitlines()[0]
                return Unreadable(f"{self.device} has no memory to make {count}: {reason} {self.transform.remedy}")
            if self.making is not None:
                self.making.synchronize()
        return batch

    def mixed(
        self, mixup: Mixup | None, x: torch.Tensor, y: torch.Tensor, update: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch, mixed, for work on the current stream, which the host does not wait for."""
        if self.mixing is not None:
            consumer = torch.cuda.current_stream(self.device)
            if mixup is not None:
                with torch.cuda.stream(self.mixing):
                    x.record_stream(self.mixing)
                    x, y = mixup(x, y, update)
                consumer.wait_stream(self.mixing)
            x.record_stream(consumer)  # its memory is not reused before the consumer has read it
            return x, y
        return mixup(x, y, update) if mixup is not None else (x, y)
