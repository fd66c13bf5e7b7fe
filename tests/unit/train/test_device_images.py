"""Images decoded and augmented on a device, here the CPU, against timm's transform of PIL images."""

from __future__ import annotations

import re
import threading
import time
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.image_reference import replace_kernels
from support.pictures import smooth, write_jpegs
from support.training import same
from webdataset.writer import TarWriter

from autopar.errors import DecodingWarning, UsageError
from autopar.train import Augmentation, Batch, Data, Mixup, PartSampler, Selection, Wanted, load_data, num_images
from autopar.train.data import device_images
from autopar.train.data.datasets import PHOTO_AUGMENTATION
from autopar.train.data.device_images import (
    QUEUES,
    decode_beside_steps,
    groups,
    heights_first,
    pillow_order,
    warn_of_few_queues,
)
from autopar.train.data.device_samples import check_device_images
from autopar.train.data.loader import PartLoader
from autopar.train.data.transforms import Chain, evaluation_transform, image_format, training_transform

CPU = torch.device("cpu")
TRAIN, SIDE = 16, 32
CROPPED = replace(PHOTO_AUGMENTATION, color_jitter=0.0)


@pytest.fixture(autouse=True)
def images_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth JPEGs of several sizes as imagefolder and as WebDataset."""
    root = tmp_path_factory.mktemp("photos")
    write_jpegs(root, TRAIN, 6, sizes=((60, 45), (40, 72), (50, 50)))
    (root / "shards").mkdir()
    for split, shards in (("train", 4), ("val", 1)):
        files = sorted((root / split).glob("*/*.jpg"))
        for shard in range(shards):
            with TarWriter(str(root / "shards" / f"{split}-{shard}.tar")) as writer:
                for file in files[shard::shards]:
                    label = int(file.parent.name.removeprefix("class"))
                    writer.write({"__key__": file.stem, "jpg": file.read_bytes(), "cls": label})
    return root


def folder(root: Path, **wanted: Any) -> Data:
    return load_data("imagefolder", Wanted(SIDE, folder=root, **wanted))


def shards(root: Path) -> Data:
    selection = Selection(val_split=f"{root}/shards/val-0.tar")
    return load_data(f"wds:{root}/shards/train-{{0..3}}.tar", Wanted(SIDE, selection=selection))


def loader(data: Data, augmentation: Augmentation, device: torch.device | None = CPU, **options: Any) -> PartLoader:
    """Loader of training batches of 8."""
    parts = {name: options.pop(name) for name in ("data_rank", "data_size", "repeats") if name in options}
    sampler = PartSampler(num_images(data.train), 8, seed=5, **parts)
    transform = training_transform(data.form, augmentation)
    options = {"decode": device is not None} | options
    return PartLoader(data.train, sampler, transform, data.form, random_seed=5, device=device, **options)


# -- pixels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"train_interpolation": "bilinear", "reprob": 0.6}, {"color_jitter": 0.4}])
@pytest.mark.parametrize("channels", [3, 1])
def test_training_images_are_those_of_timm(changes: dict[str, Any], channels: int, photos: Path) -> None:
    data, augmentation = folder(photos, channels=channels), replace(CROPPED, **changes)
    ours, theirs = (list(loader(data, augmentation, device).epoch(2)) for device in (CPU, None))
    assert len(ours) == TRAIN // 8 and same(ours, theirs)
    assert any((batch.x == 0).any() for batch in ours) == bool(augmentation.reprob)


@pytest.mark.parametrize(
    ("crop_pct", "crop_mode"), [(0.875, "center"), (1.0, "squash"), (0.9, "border"), (1.0, "border")]
)
def test_test_images_are_those_of_timm(crop_pct: float, crop_mode: str, photos: Path) -> None:
    data = folder(photos, crop_pct=crop_pct, crop_mode=crop_mode)
    transform = evaluation_transform(data.form)
    batches = [
        list(PartLoader(data.test, PartSampler(6, 4, training=False), transform, data.form, **where).epoch(1))
        for where in ({"device": CPU, "decode": True}, {})
    ]
    assert [batch.count for batch in batches[0]] == [4, 2]
    assert same(*batches)


def test_a_batch_is_decoded_in_groups(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(groups([3, 4, 5, 20, 1])) == [slice(0, 5)]
    whole = list(loader(folder(photos), CROPPED).epoch(1))
    monkeypatch.setattr(device_images, "DECODED_BYTES", 9)
    assert list(groups([3, 4, 5, 20, 1])) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert same(list(loader(folder(photos), CROPPED).epoch(1)), whole)


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_format_repeats_and_mixing(channels_last: bool, photos: Path) -> None:
    data = folder(photos)
    options: dict[str, Any] = {"mixup": Mixup(4, 0.4, 1.0), "repeats": 2, "channels_last": channels_last}
    ours, theirs = (list(loader(data, CROPPED, device, **options).epoch(1)) for device in (CPU, None))
    assert same(ours, theirs)
    for batch, expected in zip(ours, theirs, strict=True):
        assert batch.x.stride() == expected.x.stride() and batch.y.shape == (8, 4)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("read", [folder, shards])
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"reprob": 0.6, "color_jitter": 0.9}, {"mixup": Mixup(4, 0.4, 1.0), "repeats": 2, "channels_last": True}),
        ({"aa": "rand-m9-mstd0.5", "train_interpolation": "bicubic"}, {"num_workers": 1}),
    ],
)  # fmt: skip
def test_images_that_processes_crop_are_finished_without_a_difference(
    changes: dict[str, Any], options: dict[str, Any], read: Any, channels: int, photos: Path
) -> None:
    if (read is shards and "repeats" in options) or (channels == 1 and "aa" in changes):
        options = {name: value for name, value in options.items() if name != "repeats"}
        changes = {name: value for name, value in changes.items() if name != "aa"}
    data = read(photos)
    data = replace(data, form=image_format(channels, SIDE, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    augmentation = replace(PHOTO_AUGMENTATION, **changes)
    ours, theirs = (
        list(loader(data, augmentation, device, decode=False, **options).epoch(2)) for device in (CPU, None)
    )
    assert len(ours) == TRAIN // 8 and same(ours, theirs)
    layout = torch.channels_last if "channels_last" in options else torch.contiguous_format
    assert all(own.x.is_contiguous(memory_format=layout) and own.x.dtype == torch.float32 for own in ours)


@pytest.mark.parametrize("decode", [False, True])
def test_images_of_odd_sizes(decode: bool, tmp_path: Path) -> None:
    """A pixel, of which timm draws empty crops, lines, and crops so large that processes resize them."""
    sizes = ((1, 1), (1, 300), (200, 2), (3, 2), (SIDE, SIDE), (400, 30), (150, 210), (33, 32))
    write_jpegs(tmp_path, 16, 8, sizes, noise=60.0)
    smooth(0, (1, 1)).save(tmp_path / "train" / "class0" / "pixel.png")
    smooth(0, (90, 120), 60.0).save(tmp_path / "val" / "class0" / "portrait.png")
    data = folder(tmp_path)
    wild = Augmentation(
        scale=(0.01, 1.0), ratio=(0.1, 10.0), hflip=1.0, color_jitter=0.9, reprob=1.0, train_interpolation="random"
    )
    transform = evaluation_transform(data.form)
    results = []
    for where in ({"device": CPU, "decode": decode}, {}):
        test = PartLoader(
            data.test, PartSampler(num_images(data.test), 4, training=False), transform, data.form, **where
        )
        results.append([*loader(data, wild, where.get("device"), decode=decode).epoch(1), *test.epoch(1)])
    assert len(results[0]) == 5 and same(*results)


def test_the_order_in_which_pillow_resizes() -> None:
    generator = np.random.default_rng(5)
    orders = set()
    for number in range(300):
        height, width, tall, wide = (int(size) for size in generator.integers(1, 260, 4))
        if number % 8 == 0:
            height, width = 600, 5
        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        turned = bool(heights_first(np.array([[height, width]]), np.array([[tall, wide]]))[0])
        between = (width, tall) if turned else (wide, height)
        once, twice = image.resize((wide, tall)), image.resize(between).resize((wide, tall))
        assert once == twice, (height, width, tall, wide)
        orders.add(turned)
    assert orders == {any(pillow_order()), False}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_images_have_the_default_dtype(dtype: torch.dtype, photos: Path) -> None:
    torch.set_default_dtype(dtype)
    try:
        data = folder(photos)
        ours, theirs = (list(loader(data, PHOTO_AUGMENTATION, device, decode=False).epoch(1)) for device in (CPU, None))
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(ours, theirs) and ours[0].x.dtype == dtype


@pytest.mark.parametrize("mixup", [None, Mixup(4, 0.4, 1.0)])
def test_a_batch_is_freed_when_the_next_one_is_asked_for(
    mixup: Mixup | None, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def noted(real: Any) -> Any:
        def call(*args: Any) -> Any:
            x, y = real(*args)
            made.append(weakref.ref(x))
            return x, y

        return call

    monkeypatch.setattr(device_images.DeviceTransform, "__call__", noted(device_images.DeviceTransform.__call__))
    monkeypatch.setattr(Mixup, "__call__", noted(Mixup.__call__))
    repeated = loader(folder(photos), CROPPED, decode=False, mixup=mixup, repeats=3)
    for batch in repeated.epoch(1):
        time.sleep(0.2)  # until the next one is made
        assert sum(each() is not None for each in made) <= 2, "this one and the next one"
        del batch
    assert len(made) == (2 if mixup is None else 4)


def test_what_pillow_cannot_do_names_the_image(photos: Path) -> None:
    def refuse(image: Any) -> Any:
        raise ValueError("bits must be between or equal to 1 and 8")

    data = folder(photos)
    sampler = PartSampler(num_images(data.train), 8, seed=5)
    images = PartLoader(data.train, sampler, Chain("RGB", (refuse,)), data.form, random_seed=5)
    message = r"^Pillow cannot change image \d+ of \d+×\d+ as timm's transform asks: bits must be between or equal to 1"
    with pytest.raises(UsageError, match=message):
        next(images.epoch(1))


def test_test_images_that_processes_crop(photos: Path) -> None:
    data = folder(photos)
    transform = evaluation_transform(data.form)
    ours, theirs = (
        list(PartLoader(data.test, PartSampler(6, 4, training=False), transform, data.form, device=device).epoch(1))
        for device in (CPU, None)
    )
    assert same(ours, theirs) and [batch.count for batch in ours] == [4, 2]


def test_shifted_images_are_finished_by_processes(photos: Path) -> None:
    shifted = loader(folder(photos), replace(PHOTO_AUGMENTATION, shift=2), decode=False)
    assert shifted.device_batches is None and next(shifted.epoch(1)).x.shape == (8, 3, SIDE, SIDE)


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_that_no_jpeg_decoder_of_a_gpu_takes(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
    picture = smooth(1, (50, 40))
    for number in range(2):
        for name, image in (
            ("rgb.jpg", picture), ("png.png", picture), ("webp.webp", picture), ("cmyk.jpg", picture.convert("CMYK")),
            ("grey.jpg", picture.convert("L")), ("grey.png", picture.convert("L")), ("palette.png", picture.quantize()),
        ):  # fmt: skip
            image.save(tmp_path / "train" / "a" / f"{number}{name}")
        picture.save(tmp_path / "train" / "a" / f"{number}progressive.jpg", progressive=True)
    picture.save(tmp_path / "val" / "a" / "1.jpg")
    data = folder(tmp_path)
    decoded: list[int] = []
    real = device_images.DeviceTransform.decoded_jpegs
    monkeypatch.setattr(
        device_images.DeviceTransform, "decoded_jpegs",
        lambda self, jpegs, names: (decoded.append(len(jpegs)), real(self, jpegs, names))[1],
    )  # fmt: skip
    ours, theirs = (list(loader(data, CROPPED, device).epoch(1)) for device in (CPU, None))
    assert sum(decoded) == 6  # colour, grey and progressive
    assert same(ours, theirs)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["text", "cut off", "gone", "cut off with an end"])
def test_a_broken_file_has_the_error_of_the_other_loader(damage: str, workers: int, tmp_path: Path) -> None:
    write_jpegs(tmp_path, TRAIN, 4)
    data = folder(tmp_path)
    file = sorted((tmp_path / "train").glob("*/*.jpg"))[9]
    if damage == "text":
        file.write_bytes(b"no image")
    elif damage == "gone":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] + (b"\xff\xd9" if "end" in damage else b""))
    errors = []
    for device in (CPU, None):
        try:
            list(loader(data, CROPPED, device, num_workers=workers).epoch(1))
        except UsageError as error:
            errors.append(str(error))
    if damage == "cut off with an end":  # no error of libjpeg: it fills the rest
        assert errors == []
        return
    assert len(errors) == 2 and errors[0] == errors[1]
    assert errors[0].startswith(f"Cannot read image 9 of {TRAIN}, {file}: ") and "\n" not in errors[0], errors


def test_what_the_decoder_refuses_is_decoded_by_pillow(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = folder(photos)
    expected = list(loader(data, CROPPED).epoch(1))
    ours = loader(data, CROPPED)
    real, shapes = ours.device_batches.transform.io.decode_jpeg, []  # type: ignore[union-attr]

    def refusing(jpegs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        images = real(jpegs, **options)
        if any(image.shape[1:] == (45, 60) for image in images):
            shapes.append(len(images))
            raise RuntimeError("unsupported")
        return images

    monkeypatch.setattr("torchvision.io.decode_jpeg", refusing)
    assert same(list(ours.epoch(1)), expected) and shapes.count(1) == 6


def test_a_device_without_memory_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error while decoding JPEG images: CUDA out of memory.\nException raised from malloc")

    images = loader(folder(photos), CROPPED)
    monkeypatch.setattr("torchvision.io.decode_jpeg", full)
    message = "cpu has no memory to make 8 images: Error while decoding JPEG images: CUDA out of memory. Leave --load"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        next(images.epoch(1))


# -- the same images everywhere ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
@pytest.mark.parametrize("read", [folder, shards])
def test_batches_are_the_same_on_every_mesh_and_from_every_position(read: Any, photos: Path) -> None:
    data = read(photos)
    whole = list(loader(data, PHOTO_AUGMENTATION).epoch(2))
    assert len(whole) == 2 and not same(whole, list(loader(data, PHOTO_AUGMENTATION).epoch(1)))
    several = loader(data, PHOTO_AUGMENTATION, num_workers=2)
    assert same(list(several.epoch(2, 1)), whole[1:]) and same(list(several.epoch(2)), whole)
    parts = [list(loader(data, PHOTO_AUGMENTATION, data_rank=rank, data_size=2).epoch(2)) for rank in range(2)]
    joined = [Batch(torch.cat([a.x, b.x]), torch.cat([a.y, b.y]), 8) for a, b in zip(*parts, strict=True)]
    assert same(joined, whole)
    unread = loader(data, PHOTO_AUGMENTATION, reads=False)
    assert unread.device_batches is None
    assert all(a.x.is_meta and torch.equal(a.y, b.y) for a, b in zip(unread.epoch(2), whole, strict=True))


def test_the_next_batch_is_made_while_one_is_trained_on(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made, two = device_images.DeviceTransform.__call__, [], threading.Event()

    def noted(self: Any, shares: Any) -> Any:
        made.append(threading.current_thread())
        batch = real(self, shares)
        if len(made) == 2:
            two.set()
        return batch

    monkeypatch.setattr(device_images.DeviceTransform, "__call__", noted)
    epoch = loader(folder(photos), CROPPED).epoch(1)
    next(epoch)
    assert two.wait(20) and threading.main_thread() not in made
    assert len(list(epoch)) == 1 and len(made) == 2


def test_an_epoch_that_is_left_early_ends_its_thread(photos: Path) -> None:
    epoch = loader(folder(photos), CROPPED).epoch(1)
    first = next(epoch)
    epoch.close()  # type: ignore[attr-defined]
    assert first.count == 8 and not [t for t in threading.enumerate() if t.name.startswith("images")]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "form", "message"),
    [
        ({"aa": "rand-m9"}, {}, "--loader gpu cannot do --aa rand-m9, which changes images of Pillow alone. Leave one"),
        ({"shift": 2}, {}, "--loader gpu cannot do --shift 2"),
        ({"train_interpolation": "lanczos"}, {}, "cannot do --train-interpolation lanczos, which resizes images of P"),
        ({}, {"interpolation": "box"}, "cannot do --interpolation box, which resizes images of Pillow alone. Use bili"),
    ],
)
def test_changes_that_a_device_cannot_make(changes: Any, form: Any, message: str, photos: Path) -> None:
    data = folder(photos)
    with pytest.raises(UsageError, match=re.escape(message)):
        check_device_images(data.train, replace(data.form, **form), replace(PHOTO_AUGMENTATION, **changes))


def test_images_in_memory_have_nothing_to_decode() -> None:
    data = load_data("digits", Wanted(8))
    with pytest.raises(UsageError, match=r"^--loader gpu decodes images, and this data set is in memory\. Leave it"):
        check_device_images(data.train, data.form, data.augmentation)


def test_few_queues_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "")  # notes what to restore
    monkeypatch.delenv(QUEUES)
    with pytest.warns(DecodingWarning, match=rf"^Decoding on cuda:1 waits for training steps\. Set {QUEUES}=32 in"):
        warn_of_few_queues(torch.device("cuda", 1))
    decode_beside_steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_few_queues(torch.device("cuda", 1))
    for own in ("8", ""):  # the user's choice stays
        monkeypatch.setenv(QUEUES, own)
        decode_beside_steps()
        with pytest.warns(DecodingWarning):
            warn_of_few_queues(torch.device("cuda", 1))


def test_a_decoder_that_is_not_there(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("not compiled with nvJPEG")

    monkeypatch.setattr("torchvision.io.decode_jpeg", missing)
    with pytest.raises(UsageError, match=r"^torchvision cannot decode JPEGs on cpu: not compiled with nvJPEG\. Leave"):
        loader(folder(photos), CROPPED)
