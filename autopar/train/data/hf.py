"""Data sets of Hugging Face's library, read by index or streamed: of the hub, saved on disk, or folders of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.ir.units import plural
from autopar.train.data.images import Encoded, Images
from autopar.train.data.streams import Parts, Stream
from autopar.train.data.wanted import Selection, Wanted
from autopar.train.timm_optional import needed

IMAGE_KEYS, LABEL_KEYS = ("image", "img"), ("label", "labels", "fine_label")
TRAINING_SPLIT, TEST_SPLITS = "train", ("validation", "val", "test")
SAVED = ("dataset_dict.json", "state.json")  # files of save_to_disk
STRINGS = ("string", "large_string")  # dtypes
ROWS_AT_ONCE = 16
STREAMED_PARTS = 64  # of a saved data set


@dataclass(frozen=True)
class Columns:
    """Columns of image and class, and the number of each class."""

    image: str
    label: str
    numbers: Mapping[Any, int] | None  # of classes that are not numbers
    num_classes: int

    def number(self, label: Any, name: str) -> int:
        """Number of a class.

        Raises:
            UsageError: it is not one of the data set's.
        """
        number = self.numbers.get(label) if self.numbers is not None else label
        if not isinstance(number, int) or not 0 <= number < self.num_classes:
            raise UsageError(
                f"{name} is of class {label!r}, which is none of {plural(self.num_classes, 'class', 'es')}. "
                "Give the number of classes with --num-classes, another column with --target-key, or, of test images "
                "without classes, another split with --val-split, such as 'train[90%:]'."
            )
        return number


@dataclass(frozen=True)
class Rows:
    """Images of a data set that is read by index: its column of images, and their classes."""

    name: str
    dataset: Any
    column: str
    labels: Sequence[int]

    def encoded(self, index: int) -> Encoded:
        return encoded(self.dataset[index][self.column], self.labels[index], f"{self.name}[{index}]")

    def image(self, index: int) -> Any:
        return self.encoded(index).decoded()


@dataclass(frozen=True)
class StreamedRows:
    """Reader of a streamed data set."""

    name: str
    dataset: Any
    columns: Columns

    def read(self, shards: Sequence[int]) -> Iterator[Encoded]:
        """Images of shards, given by their indices.

        Raises:
            UsageError: they cannot be read, or are of an unknown class.
        """
        for shard in shards:
            # iter(), because under __iter__ the library shares shards out among loader processes, as lanes do here.
            batches, number = self.dataset.shard(self.dataset.num_shards, shard).iter(ROWS_AT_ONCE), 0
            while (batch := reported(partial(next, batches, None), self.name)) is not None:
                for image, label in zip(batch[self.columns.image], batch[self.columns.label]):
                    name = f"{self.name}, shard {shard}, row {number}"
                    yield encoded(image, self.columns.number(label, name), name)
                    number += 1


def encoded(image: Any, label: int, name: str) -> Encoded:
    """An image as the library holds it undecoded: its bytes, or else the path or address of its file.

    Raises:
        UsageError: there is none.
    """
    content, path = (image or {}).get("bytes"), (image or {}).get("path")
    found = content if content is not None else path
    if found is None:
        raise UsageError(f"{name} has no image. Take the row out of the data set.")
    return Encoded(found, label, f"{name} ({path})" if path else name)


def library() -> Any:
    return needed("datasets", "Data set 'hf:…'", extra="data")


def reported(act: Any, name: str) -> Any:
    """Result of a call of the library, whose errors are of many types.

    Raises:
        UsageError: it failed.
    """
    try:
        return act()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"Data set {name!r} cannot be read: {type(error).__name__}: {str(error).removesuffix('.')}. Give a folder "
            "of save_to_disk, a folder of images or Parquet files, or a name of the hub, which needs a network."
        ) from error


def read_hf(name: str, wanted: Wanted) -> Parts:
    """Training and test images of a data set.

    Args:
        name: a folder, or a name of the hub.

    Raises:
        UsageError: the data set, a split or a column is missing; lists those that there are.
    """
    selection = wanted.selection
    splits = reported(partial(loaded, name, selection.streaming), name)
    train = chosen(name, splits, "--train-split", selection.train_split or TRAINING_SPLIT)
    usual = next((split for split in TEST_SPLITS if split in splits), " or ".join(TEST_SPLITS))
    test = chosen(name, splits, "--val-split", selection.val_split or usual)
    columns = columns_of(name, train, selection)
    check_test_columns(name, columns, train, test)
    streaming = selection.streaming
    return Parts(
        part_of(name, train, columns, streaming, wanted.num_train, "--train-num-samples"),
        part_of(name, test, columns, streaming, wanted.num_test, "--val-num-samples"),
        columns.num_classes,
    )


def loaded(name: str, streaming: bool) -> Mapping[str, Any]:
    """Splits of a data set by name."""
    datasets = library()
    if any((Path(name) / file).is_file() for file in SAVED):
        found = datasets.load_from_disk(name)
    else:
        folder = Path(name)  # in full, since the library has loaders named like folders, such as parquet
        found = datasets.load_dataset(str(folder.resolve()) if folder.is_dir() else name, streaming=streaming)
    splits = found if isinstance(found, Mapping) else {str(found.split or TRAINING_SPLIT): found}
    return {split: rows.with_format(None) for split, rows in splits.items()}  # some are saved with torch's or numpy's


def chosen(name: str, splits: Mapping[str, Any], flag: str, split: str) -> Any:
    """The rows of a split, or of a part of it such as ``train[:90%]``.

    Raises:
        UsageError: there is none.
    """
    if split in splits:
        return splits[split]
    datasets = library()
    if "[" in split and all(isinstance(rows, datasets.Dataset) for rows in splits.values()):
        try:
            parts = datasets.ReadInstruction.from_spec(split).to_absolute({key: len(splits[key]) for key in splits})
        except (AssertionError, ValueError) as error:
            raise UsageError(f"{flag} {split}: {error}. Write a part such as 'train[:90%]'.") from error
        rows = [(splits[part.splitname], part.from_ or 0, part.to) for part in parts]
        return datasets.concatenate_datasets([r.select(range(len(r))[first:last]) for r, first, last in rows])
    raise UsageError(
        f"Data set {name!r} has no split {split}; it has {', '.join(splits)}. Name one with {flag}, or a part of one, "
        "such as 'train[:90%]', unless it is streamed."
    )


def columns_of(name: str, rows: Any, selection: Selection) -> Columns:
    """Columns of image and class.

    Raises:
        UsageError: a column is missing or of another type, or the number of classes is not known.
    """
    datasets = library()
    features = rows.features or {}
    image = column(name, features, "--input-key", selection.input_key, IMAGE_KEYS)
    label = column(name, features, "--target-key", selection.target_key, LABEL_KEYS)
    if not isinstance(features[image], datasets.Image):
        raise UsageError(
            f"Column {image} of data set {name!r} is {features[image]}, not images. Name another with --input-key."
        )
    kind = features[label]
    if isinstance(kind, datasets.ClassLabel):
        return Columns(image, label, None, selection.num_classes or kind.num_classes)
    if not isinstance(kind, datasets.Value) or not (kind.dtype in STRINGS or "int" in kind.dtype):
        raise UsageError(f"Column {label} of data set {name!r} is {kind}, not classes. Name another with --target-key.")
    if not isinstance(rows, datasets.Dataset):
        if selection.num_classes is None or kind.dtype in STRINGS:
            raise UsageError(
                f"Column {label} of data set {name!r} is {kind.dtype}, and it is streamed: which classes there are is "
                "not known. Give --num-classes if they are numbers from 0, or leave --streaming out."
            )
        return Columns(image, label, None, selection.num_classes)
    values = [value for value in rows.unique(label) if value is not None]
    if not values:
        raise UsageError(f"Column {label} of data set {name!r} has no class. Name another with --target-key.")
    if kind.dtype in STRINGS:
        if selection.num_classes not in (None, len(values)):
            raise UsageError(
                f"--num-classes {selection.num_classes}: column {label} of data set {name!r} has "
                f"{plural(len(values), 'class', 'es')} by name. Leave it out, or set the head by --model-kwargs."
            )
        return Columns(image, label, {value: i for i, value in enumerate(sorted(values))}, len(values))
    return Columns(image, label, None, selection.num_classes or 1 + max(values))


def check_test_columns(name: str, columns: Columns, train: Any, test: Any) -> None:
    """Check that test images have the columns of training images, and that a class has one number in both.

    Raises:
        UsageError: they have not.
    """
    for key in (columns.image, columns.label):
        if test.features and key not in test.features:
            raise UsageError(
                f"The test images of data set {name!r} have no column {key}; they have {', '.join(test.features)}. "
                "Name another split with --val-split, or a part of the training images, such as 'train[90%:]'."
            )
    ours, theirs = (getattr((rows.features or {}).get(columns.label), "names", None) for rows in (train, test))
    if ours is not None and theirs is not None and ours != theirs:
        number, names = next((i, pair) for i, pair in enumerate(zip_longest(ours, theirs)) if len(set(pair)) > 1)
        raise UsageError(
            f"Data set {name!r}: class {number} of column {columns.label} is {names[0]!r} in the training images and "
            f"{names[1]!r} in the test images. Give both splits the same ClassLabel with cast_column."
        )


def column(name: str, features: Mapping[str, Any], flag: str, given: str | None, usual: Sequence[str]) -> str:
    """Name of a column: the given one, or the first usual one.

    Raises:
        UsageError: there is none; lists all columns.
    """
    found = next((key for key in ((given,) if given is not None else usual) if key in features), None)
    if found is None:
        known = ", ".join(f"{key} ({type(kind).__name__})" for key, kind in features.items())
        raise UsageError(
            f"Data set {name!r} has no column {given or ' or '.join(usual)}; it has {known}. Name one with {flag}."
        )
    return found


def part_of(name: str, rows: Any, columns: Columns, streaming: bool, count: int | None, flag: str) -> Images | Stream:
    """Training or test images.

    Raises:
        UsageError: a class is unknown, or the number of streamed images.
    """
    image = library().Image(decode=False)
    rows = rows.select_columns([columns.image, columns.label]).cast_column(columns.image, image)
    if not streaming:
        labels = [columns.number(label, f"{name}[{i}]") for i, label in enumerate(rows[columns.label])]
        return Rows(name, rows.select_columns([columns.image]), columns.image, labels)
    total = count
    if isinstance(rows, library().Dataset):
        total = min(count or len(rows), len(rows))
        rows = rows.to_iterable_dataset(min(len(rows), STREAMED_PARTS))
    elif count is None and str(rows.split) in (rows.info.splits or {}):
        total = rows.info.splits[str(rows.split)].num_examples
    if not total:
        raise UsageError(f"How many images data set {name!r} streams is not known. Give their number with {flag}.")
    return Stream(total, rows.num_shards, StreamedRows(name, rows, columns).read)
