"""Data sets by name, read from small files in their own formats, and batches that are the same on any mesh."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from support.training import indexed, same
from timm.data.auto_augment import posterize as timm_posterize
from torch.utils.data import DataLoader
from torchvision import datasets

from autopar.errors import UsageError
from autopar.train import Augmentation, Data, PartSampler, Wanted, load_data, num_images
from autopar.train.data.loader import Batch, IgnoreSignals, PartLoader
from autopar.train.data.transforms import (
    Format,
    augmentations,
    evaluation_transform,
    in_mode,
    posterize,
    training_transform,
)

CLASSES = 10


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, fine: bool = False) -> np.ndarray:
    """Two small files in the format of CIFAR-10 (or, with fine labels, CIFAR-100), which torchvision then takes for the
    real ones; the training pixels [samples, 32, 32, 3].
    """
    source = datasets.CIFAR100 if fine else datasets.CIFAR10
    folder = root / source.base_folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (12, 3 * 32 * 32), dtype=np.uint8)
    sums = {}
    for name, part in (("train_part", pixels), ("test_part", pixels[:5])):
        key = "fine_labels" if fine else "labels"
        content = pickle.dumps({"data": part, key: [i % CLASSES for i in range(len(part))]})
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    names_key = "fine_label_names" if fine else "label_names"
    meta = pickle.dumps({names_key: [f"class{i}" for i in range(CLASSES)]})
    (folder / "names").write_bytes(meta)
    monkeypatch.setattr(source, "train_list", [["train_part", sums["train_part"]]])
    monkeypatch.setattr(source, "test_list", [["test_part", sums["test_part"]]])
    monkeypatch.setattr(source, "meta", {"filename": "names", "key": names_key, "md5": hashlib.md5(meta).hexdigest()})
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def write_folder(root: Path, counts: dict[str, int], side: int = 20) -> None:
    """PNGs in class folders, as many as ``counts`` says for each ``train/cat``."""
    generator = np.random.default_rng(1)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            image = Image.fromarray(generator.integers(0, 256, (side, side + 4, 3), dtype=np.uint8))
            image.save(root / name / f"{i}.png")


def tensors(
    data: Data, augmentation: Augmentation | None = None, epoch: int = 1, first: int = 0, **options
) -> list[Batch]:
    """All training batches of an epoch."""
    samples_seed, workers = options.pop("seed", 0), options.pop("workers", 0)
    chosen = augmentation or Augmentation()
    sampler = PartSampler(num_images(data.train), 4, seed=samples_seed, **options)
    return list(loader(data, sampler, chosen, num_workers=workers, random_seed=samples_seed).epoch(epoch, first))


def loader(data: Data, sampler: PartSampler, augmentation: Augmentation, **options) -> PartLoader:
    """Loader of training images."""
    options["random_seed"] = options.get("random_seed", 0) if augmentation.random else None
    return PartLoader(data.train, sampler, training_transform(data.form, augmentation), data.form, **options)


# -- data sets ---------------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_normalised():
    data = load_data("digits", Wanted(8))
    assert str(data) == "digits: 1,438 training and 359 test images of 3×8×8, 10 classes"
    transform = evaluation_transform(data.form)
    images = torch.stack([transform(indexed(data.train).image(i)) for i in range(1438)])
    assert images.shape[1:] == (3, 8, 8) and torch.equal(images[:, 0], images[:, 2])
    assert images.mean().item() == pytest.approx(0, abs=0.02)
    assert images.std().item() == pytest.approx(1, abs=0.02)
    tests, trains = (torch.tensor(part.labels).bincount() for part in (indexed(data.test), indexed(data.train)))
    assert (tests / (tests + trains)).tolist() == pytest.approx([0.2] * 10, abs=0.01)


def test_the_seed_decides_the_split():
    first, again, other = (load_data("digits", Wanted(8, 1, seed)) for seed in (1, 1, 2))
    assert indexed(first.test).labels == indexed(again.test).labels and indexed(first.test).image(3) == indexed(
        again.test
    ).image(3)
    assert indexed(first.test).labels != indexed(other.test).labels
    assert first.form.shape == (1, 8, 8)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_by_torchvision(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pixels = write_cifar(tmp_path, monkeypatch, fine=name == "cifar100")
    data = load_data(name, Wanted(32, folder=tmp_path))
    assert (len(indexed(data.train).labels), len(indexed(data.test).labels)) == (12, 5)
    assert data.num_classes == (100 if name == "cifar100" else 10)
    assert list(indexed(data.train).labels) == [i % CLASSES for i in range(12)]
    assert np.array_equal(np.asarray(indexed(data.train).image(7)), pixels[7])
    tensor = evaluation_transform(data.form)(indexed(data.train).image(7))
    raw = torch.from_numpy(pixels[7] / 255).permute(2, 0, 1)
    expected = (raw - torch.tensor(data.form.mean)[:, None, None]) / torch.tensor(data.form.std)[:, None, None]
    assert torch.allclose(tensor.double(), expected, atol=1e-6)
    assert data.augmentation == Augmentation(shift=4, hflip=0.5)
    grown = load_data(name, Wanted(48, folder=tmp_path, num_train=6))
    assert evaluation_transform(grown.form)(indexed(grown.train).image(0)).shape == (3, 48, 48)
    assert len(indexed(grown.train).labels) == 6


def test_images_in_folders(tmp_path: Path):
    write_folder(tmp_path, {"train/cat": 3, "train/dog": 2, "val/cat": 1, "val/dog": 2})
    data = load_data("imagefolder", Wanted(16, folder=tmp_path))
    assert list(indexed(data.train).labels) == [0, 0, 0, 1, 1] and list(indexed(data.test).labels) == [0, 1, 1]
    assert data.num_classes == 2
    assert indexed(data.train).image(4).size == (24, 20)
    assert evaluation_transform(data.form)(indexed(data.train).image(4)).shape == (3, 16, 16)
    batches = tensors(data, data.augmentation)
    assert len(batches) == 1 and batches[0].x.shape == (4, 3, 16, 16) and batches[0].count == 4


def test_synthetic_images_of_any_size():
    data, again, other = (load_data("synthetic", Wanted(24, 3, seed, num_train=40)) for seed in (0, 0, 1))
    train, test, same, another = map(indexed, (data.train, data.test, again.train, other.train))
    assert (len(train.labels), len(test.labels)) == (40, 128)
    assert train.image(5).size == (24, 24) and train.image(5) == same.image(5)
    assert train.image(5) not in (test.image(5), another.image(5), train.image(6))
    assert set(train.labels) <= set(range(data.num_classes))


# -- what is missing or wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("cifar", {}, "No data set is named 'cifar'. Did you mean cifar10 or cifar100? There is digits, cifar10,"),
        ("imagefoldr", {}, "Did you mean imagefolder?"),
        (
            "cifar10",
            {"folder": "none"},
            "is not in none: there is no folder none/cifar-10-batches-py. Put the unpacked",
        ),
        ("cifar100", {}, "there is no folder data/cifar-100-python. Put the unpacked https://www.cs.toronto.edu"),
        ("cifar10", {}, "(files test_batch, …), say where it is with --data-dir, or add --download."),
        ("imagefolder", {}, "needs --data-dir FOLDER, with images as FOLDER/train/CLASS/IMAGE"),
        ("imagefolder", {"folder": "none"}, "there is no folder none/train. Images must lie as FOLDER/train/CLASS"),
        ("imagefolder", {"folder": ".", "download": True}, "nothing can be downloaded. Leave --download out."),
        ("digits", {"download": True}, "Data set 'digits' needs no files. Leave --download out."),
        ("synthetic", {"folder": "x"}, "Data set 'synthetic' needs no files. Leave --data-dir x out."),
        ("digits", {"channels": 4}, "The model takes 4 channels; images have 3 (or 1, grey)."),
    ],
)
def test_data_that_is_not_there(name, wanted, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "folder" in wanted:
        wanted = wanted | {"folder": Path(wanted["folder"])}
    with pytest.raises(UsageError, match=re.escape(message)):
        load_data(name, Wanted(32, **wanted))


def test_a_damaged_cifar_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_cifar(tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-py" / "test_part").write_bytes(b"cut off")
    with pytest.raises(UsageError, match=r"a file of cifar-10-batches-py is missing or has another checksum\. Unpack"):
        load_data("cifar10", Wanted(32, folder=tmp_path))


def test_a_download_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar.tar.gz")
    with pytest.raises(UsageError, match=r"could not be fetched from http://127\.0\.0\.1:9/cifar\.tar\.gz into"):
        load_data("cifar10", Wanted(32, folder=tmp_path, download=True))


def test_ranks_do_not_download_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = r"4 processes would write the same files in .* torchvision\.datasets\.CIFAR100\('.*', download=True\)"
    with pytest.raises(UsageError, match=message):
        load_data("cifar100", Wanted(32, folder=tmp_path, download=True))


def test_folders_that_do_not_go_together(tmp_path: Path):
    write_folder(tmp_path, {"train/cat": 1, "train/dog": 1, "val/cat": 1})
    message = r"train has 2 classes, .*val has 1; only one of them has dog\. Use the same class folders"
    with pytest.raises(UsageError, match=message):
        load_data("imagefolder", Wanted(16, folder=tmp_path))
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(UsageError, match=r"Found no valid file for the classes dog"):
        load_data("imagefolder", Wanted(16, folder=tmp_path))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_named(workers: int, tmp_path: Path):
    write_folder(tmp_path, {"train/cat": 4, "val/cat": 1})
    (tmp_path / "train" / "cat" / "2.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"^Cannot read image 2 of 4, .*cat/2\.png: cannot identify image file"):
        tensors(load_data("imagefolder", Wanted(16, folder=tmp_path)), workers=workers)
    Image.new("1", (14000, 14000)).save(tmp_path / "train" / "cat" / "2.png")  # Pillow takes it for an attack
    with pytest.raises(UsageError, match=r"^Cannot read image 2 of 4, .*cat/2\.png: Image size \(196000000 pixels\)"):
        tensors(load_data("imagefolder", Wanted(16, folder=tmp_path)), workers=workers)


def test_an_image_that_pillow_refuses_is_named(tmp_path: Path) -> None:
    """With a ValueError: here for a text of more than a megabyte, decompressed."""
    write_folder(tmp_path, {"train/cat": 4, "val/cat": 1})
    texts = PngInfo()
    texts.add_text("Comment", "x" * 2_000_000, zip=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "cat" / "2.png", pnginfo=texts)
    with pytest.raises(UsageError, match=r"^Cannot read image 2 of 4, .*cat/2\.png: Decompressed data too large"):
        tensors(load_data("imagefolder", Wanted(16, folder=tmp_path)))


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = importlib.import_module

    def without(name: str, package: str | None = None):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError, match=re.escape("needs scikit-learn: pip install 'autopar[train]'")):
        load_data("digits", Wanted(32))


# -- augmentation ------------------------------------------------------------------------------------------------------

STRONG = Augmentation(2, (0.3, 1.0), (0.8, 1.2), 0.5, 0.4, "rand-m9-mstd0.5", 0.5)


def test_augmentation_depends_on_seed_epoch_and_image_alone():
    data = load_data("synthetic", Wanted(16, num_train=16))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    whole = tensors(data, STRONG)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected  # the user's draws are untouched
    assert same(whole, tensors(data, STRONG)) and same(whole, tensors(data, STRONG, workers=2))
    parts = [tensors(data, STRONG, data_rank=rank, data_size=2) for rank in range(2)]
    joined = [Batch(torch.cat([a.x, b.x]), torch.cat([a.y, b.y]), 4) for a, b in zip(*parts)]
    assert same(whole, joined)
    assert not same(whole, tensors(data, STRONG, epoch=2)) and not same(whole, tensors(data, STRONG, seed=1))


def test_the_default_device_has_no_effect():
    data = load_data("synthetic", Wanted(16, num_train=16))
    expected = tensors(data, STRONG)
    with torch.device("meta"):
        assert same(tensors(data, STRONG), expected)
        labels = loader(data, PartSampler(16, 4), Augmentation(), reads=False)
        assert [batch.y.device.type for batch in labels.epoch(1)] == ["cpu"] * 4
        assert torch.empty(0).is_meta


def test_an_epoch_from_its_middle_with_loader_processes():
    data = load_data("synthetic", Wanted(16, num_train=16))
    images = loader(data, PartSampler(16, 4), STRONG, num_workers=1)
    first, second = list(images.epoch(1)), list(images.epoch(2))
    assert len(images) == 4 and not same(first, second)
    assert same(list(images.epoch(2, 3)), second[3:]) and same(list(images.epoch(1, 1)), first[1:])


@dataclass(frozen=True)
class Noted:
    """Images of a data set; each one that is read adds a line to a file."""

    images: Any
    file: Path

    @property
    def labels(self) -> Any:
        return self.images.labels

    def image(self, index: int) -> Any:
        with self.file.open("a") as file:
            file.write(f"{index}\n")
        return self.images.image(index)


def test_processes_read_the_next_epoch_before_it_is_asked_for(tmp_path: Path) -> None:
    data, log = load_data("synthetic", Wanted(16, num_train=16)), tmp_path / "read"
    expected = [tensors(data, STRONG, epoch) for epoch in (1, 2, 3)]
    noted = replace(data, train=Noted(data.train, log))
    images = loader(noted, PartSampler(16, 4), STRONG, num_workers=1)
    assert same(list(islice(images.epoch(1), 4)), expected[0])  # it is not asked whether there is a fifth
    deadline = time.monotonic() + 30
    while log.read_text().count("\n") < 24 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text().count("\n") == 24  # two batches for the process, as within an epoch
    assert same(list(images.epoch(2)), expected[1])
    assert log.read_text().count("\n") <= 40
    assert same(list(islice(images.epoch(3, 1), 1)), expected[2][1:2])
    assert same(list(images.epoch(2, 3)), expected[1][3:]) and same(list(images.epoch(3)), expected[2])


def test_without_images_there_are_labels_and_shapes():
    data = load_data("synthetic", Wanted(16, num_train=16))
    read, unread = (list(loader(data, PartSampler(16, 4), STRONG, reads=reads).epoch(1)) for reads in (True, False))
    assert all(torch.equal(a.y, b.y) and a.x.shape == b.x.shape and b.x.is_meta for a, b in zip(read, unread))


def test_batches_of_images_may_be_in_channels_last() -> None:
    data = load_data("synthetic", Wanted(16, num_train=16))
    for reads in (True, False):
        usual, last = (
            list(loader(data, PartSampler(16, 4), STRONG, reads=reads, channels_last=asked).epoch(1))
            for asked in (False, True)
        )
        assert {batch.x.stride() for batch in usual} == {(768, 256, 16, 1)}
        assert {batch.x.stride() for batch in last} == {(768, 1, 48, 3)}
        assert not reads or all(torch.equal(a.x, b.x) for a, b in zip(usual, last))


@pytest.mark.parametrize(
    ("interpolation", "crop_pct", "crop_mode"), [("bicubic", 0.9, "center"), ("bilinear", 1.0, "squash"),
    ("bicubic", 0.95, "border")],
)  # fmt: skip
def test_test_images_have_the_pixels_of_timm(interpolation: str, crop_pct: float, crop_mode: str, tmp_path: Path):
    write_folder(tmp_path, {"train/cat": 1, "val/cat": 4}, side=50)
    for file in (tmp_path / "val" / "cat").iterdir():
        Image.open(file).save(file.with_suffix(".jpg"))
        file.unlink()
    pixels: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": interpolation}
    pixels |= {"crop_pct": crop_pct, "crop_mode": crop_mode}
    data = load_data("imagefolder", Wanted(32, folder=tmp_path, **pixels))
    images = PartLoader(data.test, PartSampler(4, 4, training=False), evaluation_transform(data.form), data.form)
    (batch,) = images.epoch(1)
    transform: Any = timm.data.create_transform((3, 32, 32), is_training=False, **pixels)
    files = sorted((tmp_path / "val" / "cat").iterdir())
    assert torch.equal(batch.x, torch.stack([transform(Image.open(file).convert("RGB")) for file in files]))


@pytest.mark.parametrize(
    "policy", ["rand-m9-mstd0.5-inc1", "rand-m5-n3-tweights", "rand-m9-t3a", "augmix-m5-w4-d2", "3a", "original",
               "originalr", "v0", "v0r"],
)  # fmt: skip
def test_every_policy_of_timm(policy: str):
    form = Format(3, 24, (0.5,) * 3, (0.25,) * 3, "bicubic")
    data = load_data("synthetic", Wanted(24, num_train=4))
    for train_interpolation in ("random", None):
        augmentation = Augmentation(aa=policy, scale=(0.5, 1.0), train_interpolation=train_interpolation)
        sampler = PartSampler(4, 4)
        (batch,) = PartLoader(data.train, sampler, training_transform(form, augmentation), form, random_seed=1).epoch(1)
        (again,) = PartLoader(data.train, sampler, training_transform(form, augmentation), form, random_seed=1).epoch(1)
        assert torch.equal(batch.x, again.x) and batch.x.isfinite().all() and batch.x.std() > 0.1


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", "v0"])
def test_policies_posterize_to_no_bits(policy: str) -> None:
    """As to Pillow before 13: the image is black."""
    form = Format(3, 24, (0.5,) * 3, (0.25,) * 3, "bicubic")
    found = [*augmentations(training_transform(form, Augmentation(aa=policy)).transforms[0])]
    assert posterize in [op.aug_fn for op in found] and not [op for op in found if op.aug_fn is timm_posterize]
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for bits in range(1, 9):
        assert posterize(image, bits) == ImageOps.posterize(image, bits)
    assert posterize(image, 0).getextrema() == posterize(image, -2).getextrema() == ((0, 0),) * 3


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("kind", ["<u2", ">u2"])
def test_images_of_16_bits_are_scaled(kind: str, mode: str) -> None:
    ramp = np.linspace(0, 65535, 64).reshape(8, 8)
    image = Image.frombytes("I;16" if kind[0] == "<" else "I;16B", (8, 8), ramp.astype(kind).tobytes())
    assert np.array_equal(np.asarray(in_mode(image, mode).convert("L")), ramp.astype(np.uint16) // 257)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_of_32_bits_are_refused(mode: str) -> None:
    with pytest.raises(UsageError, match=rf"8×4 pixels has 32 bits in a channel \(Pillow's mode {mode}\), and nothing"):
        in_mode(Image.new(mode, (8, 4)), "RGB")


def test_what_is_wanted_wins_over_what_is_usual():
    data = load_data("synthetic", Wanted(24, 1, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5), interpolation="bicubic"))
    assert str(data.form) == "1×24×24, mean 0.2, std 0.5, bicubic, center crop of 1"
    with pytest.raises(UsageError, match=r"--interpolation cubic is unknown\. It is one of nearest, bilinear"):
        load_data("synthetic", Wanted(24, interpolation="cubic"))


def test_images_are_moved_not_changed():
    form = Format(1, 3, (0.0,), (1.0,))
    image = Image.fromarray(np.arange(0, 90, 10, dtype=np.uint8).reshape(3, 3))
    still = training_transform(form, Augmentation())(image)
    assert (still * 255).round().flatten().tolist() == list(range(0, 90, 10))
    move = training_transform(form, Augmentation(shift=1))
    torch.manual_seed(0)
    centres = {round(float(move(image)[0, 1, 1]) * 255) for _ in range(200)}
    assert centres == set(range(0, 90, 10))


@pytest.mark.parametrize(
    ("channels", "augmentation", "message"),
    [
        (3, Augmentation(aa="nosuchpolicy"), "timm does not understand these settings: {'aa': 'nosuchpolicy'}: Asser"),
        (3, Augmentation(scale=(0.5, 0.1)), "--scale 0.5 0.1: give two numbers above 0, the smaller one first."),
        (3, Augmentation(aa="rand-m9-foo"), "timm would ignore 'foo'"),
        (1, Augmentation(aa="rand-m9"), "--aa rand-m9 changes colours, but the images are grey"),
        (
            3,
            Augmentation(aa="3a", train_interpolation="box"),
            "turns images, which Pillow cannot do with interpolation box",
        ),
        (3, Augmentation(train_interpolation="cubic"), "--train-interpolation cubic is unknown. It is one of random,"),
    ],
)
def test_augmentation_that_cannot_be(channels, augmentation, message):
    with pytest.raises(UsageError, match=message):
        training_transform(Format(channels, 8, (0.5,) * channels, (0.5,) * channels), augmentation)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who sent a signal")
def test_a_loader_process_heeds_sigterm_of_its_parent_alone(tmp_path: Path):
    started = tmp_path / "started"
    init = IgnoreSignals(lambda worker: started.touch())
    batches = iter(DataLoader(range(64), num_workers=1, prefetch_factor=1, worker_init_fn=init))  # type: ignore[arg-type]
    next(batches)
    assert started.exists()
    (process,) = batches._workers  # type: ignore[attr-defined]
    for name in ("TERM", "INT"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    time.sleep(0.3)
    assert [int(batch) for batch in batches] == list(range(1, 64))
    batches = iter(DataLoader(range(64), num_workers=1, worker_init_fn=init))  # type: ignore[arg-type]
    next(batches)
    (process,) = batches._workers  # type: ignore[attr-defined]
    process.terminate()
    process.join(20)
    assert process.exitcode == 0
