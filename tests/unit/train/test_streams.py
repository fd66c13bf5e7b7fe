"""Data sets of Hugging Face and WebDataset: the same images on every mesh, each rank its own, from any position."""

from __future__ import annotations

import importlib
import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from support.image_reference import replace_kernels
from support.training import indexed, same
from webdataset.writer import TarWriter

from autopar.errors import UsageError
from autopar.train import Augmentation, Batch, Data, PartLoader, PartSampler, Selection, Wanted, load_data, num_images
from autopar.train.data.images import Encoded
from autopar.train.data.streams import Stream, num_lanes, shuffled
from autopar.train.data.transforms import training_transform

SIDE = 8
SHARDS = 4
TRAIN, TEST = 24, 7
MOVED = Augmentation(shift=2, hflip=0.5)


def picture(number: int) -> Image.Image:
    """A plain image, whose colour is its number."""
    return Image.new("RGB", (SIDE, SIDE), (number, 2 * number, 255 - number))


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Arrow files of this module's data sets lie in its own folder, and nothing is fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as WebDataset (shards), of save_to_disk (saved) and as Parquet files (parquet, and rows)."""
    root = tmp_path_factory.mktemp("saved")
    for name in ("shards", "parquet", "rows"):
        (root / name).mkdir()
    splits = {}
    for split, count, shards in (("train", TRAIN, SHARDS), ("validation", TEST, 1)):
        for shard in range(shards):
            with TarWriter(str(root / "shards" / f"{split}-{shard}.tar")) as writer:
                for i in range(count * shard // shards, count * (shard + 1) // shards):
                    writer.write({"__key__": f"{i:03}", "png": png(i), "cls": i % 3})
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b", "c"]))
        rows = {
            "image": [{"bytes": png(i), "path": None} for i in range(count)],
            "label": [i % 3 for i in range(count)],
        }
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
        for shard in range(shards):
            part = splits[split].shard(shards, shard)
            for name in ("parquet", "rows"):
                part.to_parquet(root / name / f"{split}-{shard:05}-of-{shards:05}.parquet")
    datasets.DatasetDict(splits).save_to_disk(root / "saved")
    return root


STREAMS = {
    "wds:{}/shards/train-{{0..3}}.tar": Selection(val_split="{}/shards/validation-0.tar"),
    "hf:{}/parquet": Selection(streaming=True),
    "hf:{}/saved": Selection(streaming=True),
}


def load(name: str, root: Path, selection: Selection | None = None, **wanted: Any) -> Data:
    selection = selection or STREAMS.get(name, Selection())
    if selection.val_split is not None:
        selection = replace(selection, val_split=selection.val_split.format(root))
    pixels: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "crop_pct": 1.0}
    if name == "hf:{}/parquet" and selection.streaming:  # files that do not tell their number of rows in advance
        pixels |= {"num_train": TRAIN, "num_test": TEST}
    return load_data(name.format(root), Wanted(SIDE, selection=selection, **pixels | wanted))


def batches(data: Data, epoch: int = 1, first: int = 0, rank: int = 0, size: int = 1, **options: Any) -> list[Batch]:
    """Training batches of 8 from a batch on."""
    augmentation = options.pop("augmentation", Augmentation())
    sampler = PartSampler(num_images(data.train), 8, rank, size, seed=options.pop("seed", 5))
    options["random_seed"] = 5 if augmentation.random else None
    loader = PartLoader(data.train, sampler, training_transform(data.form, augmentation), data.form, **options)
    return list(loader.epoch(epoch, first))


def numbers(read: list[Batch]) -> list[int]:
    """Images of batches, by their colours."""
    return [round(float(image[0].max()) * 255) for batch in read for image in batch.x]


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_an_epoch_of_a_stream_has_each_image_once(name: str, saved: Path) -> None:
    data = load(name, saved)
    assert str(data).endswith("24 training and 7 test images of 3×8×8, 3 classes")
    read = batches(data)
    assert sorted(numbers(read)) == list(range(TRAIN)) != numbers(read)
    assert [int(y) for batch in read for y in batch.y] == [number % 3 for number in numbers(read)]
    assert numbers(batches(data, epoch=2)) != numbers(read) != numbers(batches(data, seed=6))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("name", STREAMS)
def test_batches_of_a_stream_are_the_same_on_every_mesh_and_from_every_position(name: str, saved: Path) -> None:
    data = load(name, saved)
    whole = batches(data, 2, augmentation=MOVED)
    assert same(batches(data, 2, 1, augmentation=MOVED, num_workers=3), whole[1:])
    parts = [batches(data, 2, 1, rank, 2, augmentation=MOVED) for rank in range(2)]
    joined = [Batch(torch.cat([a.x, b.x]), torch.cat([a.y, b.y]), 8) for a, b in zip(*parts, strict=True)]
    assert same(joined, whole[1:])
    unread = batches(data, 2, augmentation=MOVED, reads=False)
    assert all(a.x.is_meta and a.x.shape == b.x.shape and torch.equal(a.y, b.y) for a, b in zip(unread, whole))


def test_loader_processes_go_on_to_the_next_epoch(saved: Path) -> None:
    data = load("wds:{}/shards/train-{{0..3}}.tar", saved)
    sampler = PartSampler(TRAIN, 8, seed=5)
    loader = PartLoader(data.train, sampler, training_transform(data.form, MOVED), data.form, True, 2, random_seed=5)
    for epoch, first in ((1, 1), (2, 0)):
        assert same(list(loader.epoch(epoch, first)), batches(data, epoch, first, augmentation=MOVED))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(("size", "batch", "workers"), [(1, 4, 0), (2, 4, 1), (1, 6, 2)])
def test_evaluation_of_a_stream_counts_each_image_once(
    name: str, size: int, batch: int, workers: int, saved: Path
) -> None:
    """7 images in batches of 6 end with a batch of one image, so that one of two processes has none."""
    data, seen = load(name, saved), []
    for rank in range(size):
        sampler = PartSampler(TEST, batch, rank, size, training=False)
        transform = training_transform(data.form, Augmentation())
        loader = PartLoader(data.test, sampler, transform, data.form, True, workers)
        seen += [number for batch in loader.epoch(1) for number in numbers([Batch(batch.x[: batch.count], None, 0)])]
    assert sorted(seen) == list(range(TEST))


@pytest.mark.parametrize("name", [*STREAMS, "hf:{}/rows"])
def test_a_device_makes_the_images_of_every_library(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch)
    data = load(name, saved)
    changed = Augmentation(scale=(0.3, 1.0), hflip=0.5, color_jitter=0.4, reprob=0.5)
    ours, theirs = (batches(data, augmentation=changed, device=device) for device in (torch.device("cpu"), None))
    assert len(ours) == TRAIN // 8
    for batch, expected in zip(ours, theirs, strict=True):
        assert torch.equal(batch.y, expected.y) and torch.equal(batch.x, expected.x)


def test_ranks_read_different_shards(saved: Path) -> None:
    data = load("wds:{}/shards/train-{{0..3}}.tar", saved)
    stream = data.train
    assert isinstance(stream, Stream)
    opened: list[set[int]] = []

    def read(shards):
        opened[-1].update(shards)
        return stream.read(shards)

    watched = Data(data.name, Stream(TRAIN, SHARDS, read), data.test, 3, data.form, data.augmentation)
    for rank in range(2):
        opened.append(set())
        batches(watched, rank=rank, size=2)
    assert opened[0] | opened[1] == set(range(SHARDS)) and not opened[0] & opened[1]


@pytest.mark.parametrize(
    ("shards", "batch", "lanes"),
    [(1, 8, 1), (4, 8, 4), (4, 6, 2), (3, 8, 1), (1024, 256, 64), (1000, 256, 32), (97, 256, 4), (64, 7, 1)],
)
def test_lanes_share_batches_evenly_and_shards_about_evenly(shards: int, batch: int, lanes: int) -> None:
    assert num_lanes(shards, batch) == lanes


def test_a_lane_begins_again_if_an_epoch_is_longer_than_its_shards(saved: Path) -> None:
    data = load("wds:{}/shards/train-{{0..3}}.tar", saved, num_train=40)
    read = numbers(batches(data))
    assert len(read) == 40 and set(read) == set(range(TRAIN))


def test_a_shuffle_buffer_mixes_what_it_holds() -> None:
    samples = [Encoded(b"", i, "") for i in range(50)]
    mixed = [sample.label for sample in shuffled(iter(samples), 10, random.Random(1))]
    assert sorted(mixed) == list(range(50)) != mixed
    assert all(position >= label - 9 for position, label in enumerate(mixed))  # an image waits, it does not hurry


# -- by index ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hf:{}/saved", "hf:{}/rows"])
def test_a_data_set_by_index(name: str, saved: Path) -> None:
    data = load(name, saved, Selection())
    assert list(indexed(data.train).labels) == [i % 3 for i in range(TRAIN)] and data.num_classes == 3
    assert np.array_equal(np.asarray(indexed(data.train).image(5)), np.asarray(picture(5)))
    assert sorted(numbers(batches(data, num_workers=1))) == list(range(TRAIN))
    part = load(name, saved, Selection(train_split="train[:50%]", val_split="train[20:]"), num_train=9)
    assert len(indexed(part.train).labels) == 9 and [
        indexed(part.test).image(0).getpixel((0, 0))[0],
        len(indexed(part.test).labels),
    ] == [20, 4]


def test_classes_with_names_are_numbered_in_order(tmp_path: Path) -> None:
    rows = {"img": [picture(i) for i in range(4)], "kind": ["pig", "cat", "pig", "dog"]}
    rows_set = datasets.Dataset.from_dict(rows).cast_column("img", datasets.Image())
    datasets.DatasetDict({"train": rows_set, "test": rows_set.select([1])}).save_to_disk(tmp_path / "saved")
    data = load("hf:{}/saved", tmp_path, Selection(target_key="kind"))
    assert (list(indexed(data.train).labels), list(indexed(data.test).labels), data.num_classes) == (
        [2, 0, 2, 1],
        [0],
        3,
    )
    with pytest.raises(UsageError, match=r"no column label or labels or fine_label; it has img \(Image\), kind \(V"):
        load("hf:{}/saved", tmp_path)
    for split in ("train", "test"):
        rows_set.to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    with pytest.raises(UsageError, match=r"Column kind of .* is string, and it is streamed"):
        load("hf:{}/parquet", tmp_path, Selection(target_key="kind", streaming=True))


@pytest.mark.parametrize("streaming", [False, True])
def test_test_images_have_the_columns_and_classes_of_training_images(streaming: bool, tmp_path: Path) -> None:
    def rows(kind: str, names: list[str]) -> datasets.Dataset:
        rows = {"image": [picture(i) for i in range(4)], kind: [0, 1, 1, 0]}
        features = datasets.Features({"image": datasets.Image(), kind: datasets.ClassLabel(names=names)})
        return datasets.Dataset.from_dict(rows, features=features)

    selection = Selection(streaming=streaming)
    for test, message in (
        (rows("label", ["pig", "cat"]), "class 0 of column label is 'cat' in the training images and 'pig' in the te"),
        (rows("label", ["cat", "pig", "rat"]), "class 2 of column label is None in the training images"),
        (rows("kind", ["cat", "pig"]), "have no column label; they have image, kind. Name another split with"),
    ):
        folder = tmp_path / message[:12].replace(" ", "")
        datasets.DatasetDict({"train": rows("label", ["cat", "pig"]), "test": test}).save_to_disk(folder / "saved")
        with pytest.raises(UsageError, match=re.escape(message)):
            load("hf:{}/saved", folder, selection)


# -- what is missing or wrong ------------------------------------------------------------------------------------------

WDS, VAL = "wds:{}/shards/train-{{0..3}}.tar", "{}/shards/validation-0.tar"


@pytest.mark.parametrize(
    ("name", "selection", "wanted", "message"),
    [
        (WDS, Selection(), {}, "needs the shards of the test images: --val-split 'shards/val-{00..07}.tar'."),
        ("wds:{}/train-{{0..3}}.tar", Selection(val_split=VAL), {}, "(4 of 4 shards are missing). Write a pattern"),
        ("wds:{}/train-{{0..3.tar", Selection(val_split=VAL), {}, "Write braces such as {000..127}."),
        (WDS, Selection(val_split=VAL, streaming=True), {}, "is always streamed. Leave --streaming out."),
        (
            WDS,
            Selection(val_split=VAL, input_key="jpg"),
            {},
            "train-0.tar has no jpg; it has cls, png. Name the",
        ),
        (WDS, Selection(val_split=VAL, target_key="json"), {}, "have no entry with a suffix json, which holds"),
        (
            WDS,
            Selection(val_split=VAL, num_classes=2),
            {"num_train": 24, "num_test": 7},
            "is of class 2, but there are 2 classes, counted from 0. Give their number with --num-classes.",
        ),
        ("wds:https://host/{{0..3}}.tar", Selection(val_split=VAL), {}, "is not a local file, so its images are not c"),
        (
            "hf:{}/saved",
            Selection(train_split="nope"),
            {},
            "has no split nope; it has train, validation. Name one",
        ),
        ("hf:{}/saved", Selection(train_split="train[x]"), {}, "--train-split train[x]: Unrecognized instruction"),
        ("hf:{}/saved", Selection(input_key="label"), {}, "not images. Name another with --input-key."),
        ("hf:{}/saved", Selection(target_key="image"), {}, "not classes. Name another with --target-key."),
        ("hf:{}/saved", Selection(num_classes=2), {}, "saved[2] is of class 2, which is none of 2 classes. Give the"),
        (
            "hf:{}/parquet",
            Selection(streaming=True),
            {"num_test": None},
            "streams is not known. Give their number with",
        ),
        ("hf:{}/shards/train-0.tar/x", Selection(), {}, "cannot be read: "),
        ("hf:{}/saved", Selection(), {"folder": Path("x")}, "says itself where its files are. Leave --data-dir x out."),
        ("synthetic", Selection(train_split="a"), {}, "--train-split is for data sets hf:NAME and wds:SHARDS alone."),
        ("hff:x", Selection(), {}, "No data set is named 'hff:x'. "),
    ],
)
def test_data_that_cannot_be_read(name, selection, wanted, message, saved: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        batches(load(name, saved, selection, **wanted))


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_shards_and_images_are_named(workers: int, saved: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar"
    cut.write_bytes((saved / "shards" / "train-0.tar").read_bytes()[:4000])
    name = f"wds:{saved}/shards/train-0.tar::{cut}"
    with pytest.raises(UsageError, match=r"^Cannot read shard .*cut\.tar: ReadError: unexpected end of data"):
        load(name, saved, Selection(val_split=VAL))
    data = load(name, saved, Selection(val_split=VAL, num_classes=3), num_train=16, num_test=7)
    with pytest.raises(UsageError, match=r"Cannot read the shards of WebDataset: .*cut\.tar\. Write the shard again"):
        batches(data, num_workers=workers)
    bad = tmp_path / "bad.tar"
    with TarWriter(str(bad)) as writer:
        for i in range(8):
            writer.write({"__key__": f"{i:03}", "png": b"no image" if i == 5 else png(i), "cls": 0})
    data = load(f"wds:{bad}", saved, Selection(val_split=VAL))
    with pytest.raises(UsageError, match=r"Cannot read image 005 of .*bad\.tar: cannot identify image file"):
        batches(data, num_workers=workers)


def test_an_index_tells_the_number_of_images(saved: Path, tmp_path: Path) -> None:
    for file in (saved / "shards").glob("*.tar"):
        (tmp_path / file.name).symlink_to(file)
    sizes = {f"train-{i}.tar": 6 for i in range(SHARDS)} | {"validation-0.tar": 5}
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    data = load("wds:{}/train-{{0..3}}.tar", tmp_path, Selection(val_split="{}/validation-0.tar"))
    assert (num_images(data.train), num_images(data.test)) == (24, 5)


@pytest.mark.parametrize("text", ["[6]", '{"train-0.tar"', '{"train-0.tar": "six"}', '{"train-0.tar": null}'])
def test_an_index_that_is_none(text: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").symlink_to(saved / "shards" / "train-0.tar")
    (tmp_path / "sizes.json").write_text(text)
    with pytest.raises(UsageError, match=r"sizes\.json does not map shards to numbers of images, as in"):
        load("wds:{}/train-0.tar", tmp_path, Selection(val_split=VAL.format(saved)))


def test_samples_with_several_classes_are_counted_once(saved: Path, tmp_path: Path) -> None:
    """By the first of the suffixes that they have."""
    with TarWriter(str(tmp_path / "twice.tar")) as writer:
        for i in range(12):
            writer.write({"__key__": f"{i:03}", "png": png(i), "txt": str(9), "cls": str(i % 3)})
    data = load(f"wds:{tmp_path}/twice.tar", saved, Selection(val_split=VAL, target_key="cls;txt"))
    assert (num_images(data.train), data.num_classes) == (12, 3)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_format_that_was_saved_is_not_used(kind: str, saved: Path, tmp_path: Path) -> None:
    rows = datasets.load_from_disk(str(saved / "saved")).with_format(kind)
    rows.save_to_disk(tmp_path / "saved")
    for selection in (Selection(), Selection(streaming=True)):
        theirs, ours = (load("hf:{}/saved", root, selection) for root in (saved, tmp_path))
        assert same(batches(theirs), batches(ours))


@pytest.mark.parametrize("labels", [[0, None, 1], ["cat", None, "dog"]])
def test_images_without_a_class_are_named(labels: list[Any], tmp_path: Path) -> None:
    given = datasets.Dataset.from_dict({"image": [picture(i) for i in range(3)], "label": labels})
    rows = given.cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match=r"saved\[1\] is of class None, which is none of 2 classes"):
        load("hf:{}/saved", tmp_path, Selection())
    if "cat" in labels:
        with pytest.raises(UsageError, match=r"--num-classes 9: column label of data set .* has 2 classes by name"):
            load("hf:{}/saved", tmp_path, Selection(num_classes=9))


def test_more_test_images_than_there_are(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"--val-num-samples 9: the shards .*0\.tar have 7 images\. Give at most"):
        load(WDS, saved, Selection(val_split=VAL), num_test=9)
    data = load(WDS, saved, Selection(val_split=VAL, num_classes=3), num_train=24, num_test=9)
    loader = PartLoader(
        data.test, PartSampler(9, 4, training=False), training_transform(data.form, Augmentation()), data.form
    )
    with pytest.raises(UsageError, match="The test images ended before the 9 images that they should have"):
        list(loader.epoch(1))


@pytest.mark.parametrize(("name", "library"), [("hf:x", "datasets"), ("wds:x.tar", "webdataset")])
def test_a_missing_library_is_named_with_its_extra(name: str, library: str, monkeypatch) -> None:
    real = importlib.import_module

    def without(module: str, package: str | None = None):
        if module.split(".")[0] == library:
            raise ImportError(module)
        return real(module, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError, match=re.escape(f"needs {library}: pip install 'autopar[data]'")):
        load_data(name, Wanted(SIDE, selection=Selection(val_split="y.tar" if library == "webdataset" else None)))
