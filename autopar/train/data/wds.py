"""Shards of WebDataset as streams: tar files in which an image and its class have one name and different suffixes."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.train.data.images import Encoded
from autopar.train.data.streams import Parts, Stream
from autopar.train.data.wanted import Wanted
from autopar.train.timm_optional import needed

INDEX = "sizes.json"  # {"train-000.tar": 1000, …} in the folder of the shards
IMAGE_KEYS, LABEL_KEYS = "jpg;jpeg;png;webp", "cls"


@dataclass(frozen=True)
class Shards:
    """Reader of shards.

    Args:
        urls: files, or addresses that the library opens.
        image_keys, label_keys: suffixes of images and classes, the first of them that a sample has.
    """

    urls: Sequence[str]
    image_keys: Sequence[str]
    label_keys: Sequence[str]
    num_classes: int

    def read(self, shards: Sequence[int]) -> Iterator[Encoded]:
        """Images of shards, given by their indices.

        Raises:
            UsageError: a shard cannot be read, or a sample lacks its image or class.
        """
        wds = library()
        urls = wds.SimpleShardList([self.urls[shard] for shard in shards])
        samples = iter(wds.DataPipeline(urls, wds.tarfile_to_samples()))
        while True:
            try:
                sample = next(samples)
            except StopIteration:
                return
            except (OSError, ValueError, tarfile.TarError, EOFError) as error:
                raise UsageError(
                    f"Cannot read the shards of WebDataset: {type(error).__name__}: {reason(error)}. Write the shard "
                    "again, or leave it out."
                ) from error
            yield self.encoded(sample)

    def encoded(self, sample: Mapping[str, Any]) -> Encoded:
        """A sample of the library.

        Raises:
            UsageError: it lacks its image or class, or the class is no number of the data set's.
        """
        name = f"{sample['__key__']} of {sample['__url__']}"
        image, label = (self.entry(sample, keys, name) for keys in (self.image_keys, self.label_keys))
        try:
            number = int(label)
        except ValueError as error:
            raise UsageError(
                f"Sample {name}: class {label[:20]!r} is not a whole number. Name another suffix with --target-key."
            ) from error
        if not 0 <= number < self.num_classes:
            raise UsageError(
                f"Sample {name} is of class {number}, but there are {plural(self.num_classes, 'class', 'es')}, counted "
                "from 0. Give their number with --num-classes."
            )
        return Encoded(image, number, name)

    def entry(self, sample: Mapping[str, Any], keys: Sequence[str], name: str) -> bytes:
        """Content of the first of the suffixes that a sample has."""
        for key in keys:
            if key in sample:
                return sample[key]
        known = [key for key in sample if not key.startswith("__")]
        flag = "--input-key" if keys == self.image_keys else "--target-key"
        raise UsageError(
            f"Sample {name} has no {' or '.join(keys)}; it has {', '.join(known)}. Name the suffix with {flag}."
        )


def reason(error: Exception) -> str:
    """Text of an error of the library, which appends open files and addresses to its arguments."""
    return ", ".join(str(part) for part in error.args if isinstance(part, str | int))


def read_shards(pattern: str, wanted: Wanted) -> Parts:
    """Training and test images in shards.

    Args:
        pattern: the training shards, such as ``shards/train-{000..127}.tar``.

    Raises:
        UsageError: shards are missing, or numbers that they do not tell.
    """
    selection = wanted.selection
    if selection.val_split is None:
        raise UsageError(
            f"Data set 'wds:{pattern}' needs the shards of the test images: --val-split 'shards/val-{{00..07}}.tar'."
        )
    if selection.train_split is not None or selection.streaming:
        flag = "--streaming" if selection.streaming else "--train-split"
        raise UsageError(
            f"Data set 'wds:{pattern}' names its training shards, and is always streamed. Leave {flag} out."
        )
    shards = [expanded(pattern), expanded(selection.val_split)]
    counts = [wanted.num_train or indexed(shards[0]), wanted.num_test or indexed(shards[1])]
    image_keys = (selection.input_key or IMAGE_KEYS).split(";")
    label_keys = (selection.target_key or LABEL_KEYS).split(";")
    num_classes = selection.num_classes
    if num_classes is None or None in counts:
        scans = [scanned(urls, label_keys) for urls in shards]
        if (wanted.num_test or 0) > scans[1].samples:
            raise UsageError(
                f"--val-num-samples {wanted.num_test}: the shards {selection.val_split} have "
                f"{plural(scans[1].samples, 'image')}. Give at most that number."
            )
        counts = [count or scan.samples for count, scan in zip(counts, scans)]
        num_classes = num_classes or 1 + max(scan.largest for scan in scans)
    train, test = (
        Stream(count or 0, len(urls), Shards(urls, image_keys, label_keys, num_classes).read)
        for urls, count in zip(shards, counts)
    )
    for stream in (train, test):  # before anything is planned: wrong suffixes are the same in all samples
        next(stream.in_order(), None)
    return Parts(train, test, num_classes)


def library() -> Any:
    return needed("webdataset", "Data set 'wds:…'", extra="data")


def expanded(pattern: str) -> tuple[str, ...]:
    """Names of shards in a pattern with braces.

    Raises:
        UsageError: a file is missing.
    """
    try:
        urls = library().shardlists.expand_urls(pattern)
    except ValueError as error:
        raise UsageError(f"Data set 'wds:{pattern}': {error}. Write braces such as {{000..127}}.") from error
    missing = [url for url in urls if is_local(url) and not Path(url).is_file()]
    if missing:
        others = f" ({len(missing)} of {plural(len(urls), 'shard')} are missing)" if len(urls) > 1 else ""
        raise UsageError(
            f"Data set 'wds:{pattern}': there is no file {missing[0]}{others}. Write a pattern such as "
            "wds:shards/train-{000..127}.tar."
        )
    return tuple(urls)


def is_local(url: str) -> bool:
    """Whether a shard is a file: addresses have a scheme, such as https: or pipe:."""
    return ":" not in url


def indexed(urls: Sequence[str]) -> int | None:
    """Images of shards by the `INDEX` in their folders; None if it is missing or lacks a shard."""
    total = 0
    for folder in {Path(url).parent for url in urls}:
        index = folder / INDEX
        if not index.is_file():
            return None
        names = [Path(url).name for url in urls if Path(url).parent == folder]
        try:
            sizes = dict(json.loads(index.read_text()))
            if any(name not in sizes for name in names):
                return None
            total += sum(int(sizes[name]) for name in names)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f'{index} does not map shards to numbers of images, as in {{"train-000.tar": 1000}}: {error}.'
            ) from error
    return total


@dataclass(frozen=True)
class Scan:
    """Number of samples in shards, and their largest class."""

    samples: int
    largest: int


def scanned(urls: Sequence[str], label_keys: Sequence[str]) -> Scan:
    """Samples of local shards, counted by the entries with their classes; images are not read.

    Raises:
        UsageError: a shard is not local, or cannot be read.
    """
    remote = [url for url in urls if not is_local(url)]
    if remote:
        raise UsageError(
            f"Shard {remote[0]} is not a local file, so its images are not counted. Give --num-classes, and "
            f"--train-num-samples and --val-num-samples."
        )
    samples, largest = 0, 0
    for url in urls:
        found: dict[str, tuple[int, int]] = {}  # place of the suffix among the wanted ones, and class, of each sample
        try:
            with tarfile.open(url) as file:
                for entry in file:
                    stem, _, suffix = Path(entry.name).name.partition(".")
                    key = entry.name.rpartition("/")[0] + "/" + stem
                    if entry.isreg() and suffix.lower() in label_keys:
                        place = label_keys.index(suffix.lower())
                        content = file.extractfile(entry)
                        text = content.read() if content is not None else b""
                        labelled = place, int(text) if text.strip().isdigit() else 0
                        found[key] = min(found.get(key, labelled), labelled)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise UsageError(
                f"Cannot read shard {url}: {type(error).__name__}: {error}. Write it again, or leave it out."
            ) from error
        samples += len(found)
        largest = max((largest, *(number for _, number in found.values())))
    if not samples:
        raise UsageError(
            f"The {plural(len(urls), 'shard')} from {urls[0]} on have no entry with a suffix "
            f"{' or '.join(label_keys)}, which holds the class. Name the suffix with --target-key."
        )
    return Scan(samples, largest)
