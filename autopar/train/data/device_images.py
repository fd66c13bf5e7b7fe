"""Batches finished on a device, from images and draws of loader processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.train.data.device_samples import FLAG, Cropped, Draws, Entry, Undecoded
from autopar.train.data.images import Encoded
from autopar.train.data.mixup import Mixup
from autopar.train.data.streams import Unreadable
from autopar.train.data.transforms import MODES, Chain, Format
from autopar.train.timm_optional import needed

DECODED_BYTES = 1 << 28  # pixels that are on the device at once before they are resized, except of one larger image
# Pixels that are changed at once, 32 images of 224: their values stay in the GPU's cache from kernel to kernel.
PIXELS_AT_ONCE = 32 * 224**2
GREY = (19595, 38470, 7471)  # weights of colours in Pillow's mode L, of 2**16
CONTRAST, SATURATION = 1, 2  # numbers of colour changes in torchvision's ColorJitter; brightness is 0


class DeviceTransform(ABC):
    """Part of timm's transform that runs on a device, for whole batches."""

    remedy = "Plan with less --memory."

    def __init__(self, form: Format, device: torch.device, layout: torch.memory_format) -> None:
        self.form, self.device, self.layout = form, device, layout
        # Tensors, since a GPU multiplies by the inverse of a number; of the default dtype, as timm's.
        kind = torch.get_default_dtype()
        self.mean, self.std = (self.on_device(values, kind)[None, :, 0] for values in (form.mean, form.std))
        self.largest, self.area = self.on_device([255.0], kind), self.on_device([form.side**2], torch.float64)
        self.at_once = max(1, PIXELS_AT_ONCE // form.side**2)

    def __call__(self, shares: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch of the images of all loader processes: x on the device, labels [batch].

        Raises:
            UsageError: an image cannot be decoded; names it.
        """
        draws = [own for share in shares for own in share.draws]
        x = torch.empty((len(draws), *self.form.shape), device=self.device, memory_format=self.layout)
        first = 0
        for part in self.levels(shares):
            end = first + len(part)
            self.finish(part, draws[first:end], x[first:end])
            first = end
        return x, torch.cat([share.labels for share in shares])

    @abstractmethod
    def levels(self, shares: Sequence[Any]) -> Iterator[torch.Tensor]:
        """Cropped images in order, float32 [images, channels, side, side] of whole values to 255, a few at a time."""

    def finish(self, x: torch.Tensor, draws: Sequence[Draws], out: torch.Tensor) -> None:
        """Write images with flips, changed colours, normalised values and erased boxes."""
        if any(own.flip for own in draws):
            x = torch.where(self.on_device([own.flip for own in draws]), x.flip(3), x)
        if any(own.colours for own in draws):
            x = self.recoloured(x, [own.colours for own in draws])
        out.copy_(x.to(out.dtype).div_(self.largest).sub_(self.mean).div_(self.std))
        for image, own in zip(out, draws, strict=True):
            if own.erased is not None:
                top, left, height, width = own.erased
                image[:, top : top + height, left : left + width] = 0

    def recoloured(self, x: torch.Tensor, colours: Sequence[tuple[tuple[int, float], ...]]) -> torch.Tensor:
        """Images with brightness, contrast and saturation changed in each image's order; values equal Pillow's."""
        for changes in zip(*colours, strict=True):
            factor = self.on_device([value for _, value in changes])
            contrast, saturation = (self.on_device([n == kind for n, _ in changes]) for kind in (CONTRAST, SATURATION))
            grey = grey_levels(x)
            sums = grey.sum((1, 2, 3), keepdim=True, dtype=torch.float64)
            mean = sums.div_(self.area).add_(0.5).floor_().float()
            other = contrast * mean + saturation * grey  # black for brightness
            x = (x - other).mul_(factor).add_(other).clamp_(0, 255).floor_()
        return x

    def on_device(self, values: Sequence[float], kind: torch.dtype = torch.float32) -> torch.Tensor:
        """A number or truth value for each image, [batch, 1, 1, 1]."""
        kind = torch.bool if isinstance(values[0], bool) else kind
        return torch.tensor(values, dtype=kind, device=self.device).view(-1, 1, 1, 1)


def grey_levels(x: torch.Tensor) -> torch.Tensor:
    """Whole levels [batch, 1, height, width] of colours [batch, channels, height, width] as in Pillow's mode L."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)  # all sums are whole numbers below 2**24, which float32 holds
    sums = (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2]).add_(1 << 15)
    return sums.div_(1 << 16).floor_().unsqueeze(1)


class CroppedTransform(DeviceTransform):
    """The part that is left of images that loader processes decoded and cropped."""

    def levels(self, shares: Sequence[Cropped]) -> Iterator[torch.Tensor]:
        for share in shares:
            pixels = share.pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            for part in pixels.split(self.at_once):
                yield part.contiguous().float()


class EncodedTransform(DeviceTransform):
    """Decoding, the crop, and the rest, of images that loader processes read.

    Args:
        chain: timm's transform.
    """

    remedy = f"Leave {FLAG} out."

    def __init__(self, chain: Chain, form: Format, device: torch.device, layout: torch.memory_format) -> None:
        """Prepare.

        Raises:
            UsageError: the device's decoder does not work here.
        """
        super().__init__(form, device, layout)
        self.chain, self.io = chain, needed("torchvision.io", FLAG)
        self.mode = self.io.ImageReadMode.RGB if form.channels == 3 else self.io.ImageReadMode.GRAY
        self.timm = needed("timm.data.transforms", FLAG)
        try:
            probe = self.io.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8, device="cpu"))
            self.io.decode_jpeg([probe], device=self.device)
        except RuntimeError as error:
            raise UsageError(
                f"torchvision cannot decode JPEGs on {self.device}: {error}. Leave {FLAG} out, or install a "
                "torchvision with nvJPEG."
            ) from error

    def levels(self, shares: Sequence[Undecoded]) -> Iterator[torch.Tensor]:
        entries = [entry for share in shares for entry in share.entries]
        contents = [part for s in shares for part in s.content.split([entry.num_bytes for entry in s.entries])]
        for group in groups([prod(entry.shape) for entry in entries]):
            if self.device.type == "cuda":  # the decoder's stream does not wait for work on memory that it gets again
                torch.cuda.current_stream(self.device).synchronize()
            decoded = self.decoded(contents[group], entries[group])
            images = [self.resized(image, entry.draws) for image, entry in zip(decoded, entries[group], strict=True)]
            for first in range(0, len(images), self.at_once):
                yield torch.cat(images[first : first + self.at_once]).clamp_(0, 255).round_()

    def decoded(self, contents: Sequence[torch.Tensor], entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Images uint8 [channels, height, width] on the device."""
        jpegs = [content for content, entry in zip(contents, entries, strict=True) if entry.is_jpeg]
        names = [entry.name for entry in entries if entry.is_jpeg]
        decoded = iter(self.decoded_jpegs(jpegs, names) if jpegs else ())
        return [
            next(decoded) if entry.is_jpeg else content.view(entry.shape).to(self.device)
            for content, entry in zip(contents, entries, strict=True)
        ]

    def decoded_jpegs(self, jpegs: list[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
        """JPEGs on the device. Those that the device's decoder refuses are decoded by Pillow, or named in its error."""
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

    def resized(self, image: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Image float32 [1, channels, side, side], of values to 255 that are not rounded yet."""
        if draws.crop is not None:
            top, left, height, width = draws.crop
            part = image[None, :, top : top + height, left : left + width].float()
            side = (self.form.side, self.form.side)
            return F.interpolate(part, side, mode=draws.interpolation, antialias=True, align_corners=False)
        for step in self.chain.steps[:2]:  # resize and crop of timm's evaluation transform
            if isinstance(step, self.timm.CenterCropOrPad):  # takes one fill value of a tensor
                parts = zip(image, step.fill, strict=True)
                image = torch.cat([self.timm.center_crop_or_pad(c[None], step.size, fill) for c, fill in parts])
            else:
                image = step(image)
        return image[None].float()


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
