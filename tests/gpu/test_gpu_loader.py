"""Images decoded by nvJPEG against Pillow's, and training on them while the next batch is decoded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.cli import invoke
from support.pictures import smooth, write_jpegs
from support.train_cli import TINY, losses

from autopar.train import Batch, Data, Mixup, PartSampler, Wanted, load_data, num_images
from autopar.train.data import device_images
from autopar.train.data.datasets import PHOTO_AUGMENTATION
from autopar.train.data.loader import PartLoader
from autopar.train.data.transforms import evaluation_transform, training_transform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRAIN, TEST, BATCH = 64, 12, 16
# Of 255, the largest and the mean difference: decoders interpolate colours differently, and contrast enlarges that.
# One batch on an H100 was 12 and 0.4 off.
LARGEST, MEAN = 24.0, 1.5


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of several sizes and kinds, some of them grey or progressive, and files of other formats."""
    root = tmp_path_factory.mktemp("photos")
    write_jpegs(root, TRAIN - 8, TEST, sizes=((200, 150), (120, 260), (333, 251)))
    folder, picture = root / "train" / "class0", smooth(1000, (180, 140))
    for number in range(2):
        picture.convert("L").save(folder / f"grey{number}.jpg", quality=95)
        picture.save(folder / f"progressive{number}.jpg", quality=95, progressive=True)
        picture.convert("CMYK").save(folder / f"cmyk{number}.jpg", quality=95)
        picture.save(folder / f"{number}.png")
    return root


def training_batches(
    data: Data, device: torch.device | None, workers: int = 0, decode: bool = True, **options: Any
) -> list[Batch]:
    sampler = PartSampler(num_images(data.train), BATCH, seed=3)
    transform = training_transform(data.form, PHOTO_AUGMENTATION)
    images = PartLoader(
        data.train, sampler, transform, data.form, True, workers, random_seed=3, device=device, decode=decode,
        **options,
    )  # fmt: skip
    return list(images.epoch(2))


def check_levels(batches: list[Batch], expected: list[Batch], data: Data) -> None:
    """Compare pixels, in levels of 255, and targets."""
    for batch, other in zip(batches, expected, strict=True):
        assert batch.x.device.type == "cuda" and torch.equal(batch.y, other.y) and batch.x.stride() == other.x.stride()
        levels = (batch.x.cpu() - other.x).abs() * torch.tensor(data.form.std).view(1, -1, 1, 1) * 255
        assert levels.max() < LARGEST and levels.mean() < MEAN, (levels.amax((1, 2, 3)), levels.mean())


@pytest.mark.parametrize("options", [{}, {"mixup": Mixup(4, 0.4, 1.0), "channels_last": True}])
def test_training_images_of_nvjpeg(options: dict[str, Any], photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_data("imagefolder", Wanted(64, folder=photos))
    gpu = torch.device("cuda", 0)
    ours = training_batches(data, gpu, 2, **options)
    check_levels(ours, training_batches(data, None, **options), data)
    monkeypatch.setattr(device_images, "DECODED_BYTES", 1 << 18)  # a few images at once
    again = training_batches(data, gpu, **options)
    assert all(torch.equal(a.x, b.x) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("options", [{}, {"mixup": Mixup(4, 0.4, 1.0), "channels_last": True}])
def test_a_gpu_finishes_images_as_processes_do(options: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    root = shutil.copytree(photos, tmp_path / "photos")
    for level in range(1, 40, 2):  # half of one level, half of the next: the mean is a tie
        pixels = np.full((224, 224, 3), level, np.uint8)
        pixels[:112] += 1
        Image.fromarray(pixels).save(root / "train" / "class0" / f"tie{level}.png")
    data = load_data("imagefolder", Wanted(224, folder=root))  # of which the inverse of the area is not exact
    ours = training_batches(data, torch.device("cuda", 0), 2, decode=False, **options)
    for batch, other in zip(ours, training_batches(data, None, **options), strict=True):
        assert batch.x.device.type == "cuda" and batch.x.stride() == other.x.stride()
        if options:
            torch.testing.assert_close(batch.x.cpu(), other.x, rtol=1e-6, atol=1e-6)  # sums of products of mixup
        else:
            assert torch.equal(batch.x.cpu(), other.x)
        assert torch.equal(batch.y.cpu(), other.y)


def test_nvjpeg_decodes_all_kinds_of_jpeg_that_it_gets(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded by Pillow in the rank's process")

    data = load_data("imagefolder", Wanted(64, folder=photos))
    monkeypatch.setattr(device_images, "Encoded", refused)
    assert len(training_batches(data, torch.device("cuda", 0))) == TRAIN // BATCH


def test_test_images_of_nvjpeg(photos: Path) -> None:
    data = load_data("imagefolder", Wanted(64, folder=photos))
    transform = evaluation_transform(data.form)
    ours, theirs = (
        list(PartLoader(data.test, PartSampler(TEST, 5, training=False), transform, data.form, **where).epoch(1))
        for where in ({"device": torch.device("cuda", 0), "decode": True}, {})
    )
    assert [batch.count for batch in ours] == [5, 5, 2]
    check_levels(ours, theirs, data)


def test_batches_keep_their_pixels_while_others_are_decoded_and_trained_on(photos: Path) -> None:
    """Memory of a batch is not given to the next one before the consumer's stream has read it."""
    data, gpu = load_data("imagefolder", Wanted(64, folder=photos)), torch.device("cuda", 0)
    expected = [batch.x.double().sum().item() for batch in training_batches(data, gpu, mixup=Mixup(4, 0.4, 1.0))]
    sampler = PartSampler(num_images(data.train), BATCH, seed=3)
    images = PartLoader(
        data.train, sampler, training_transform(data.form, PHOTO_AUGMENTATION), data.form, random_seed=3, device=gpu,
        decode=True, mixup=Mixup(4, 0.4, 1.0),
    )  # fmt: skip
    sums = []
    for batch in images.epoch(2):
        torch.cuda._sleep(1 << 28)  # the consumer's stream is behind the host
        sums.append(batch.x.double().sum())
        del batch
    assert [value.item() for value in sums] == expected


@pytest.mark.parametrize("devices", [1, 2])
def test_runs_with_images_decoded_by_gpus(devices: int, photos: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip("needs two CUDA devices")
    few = [
        *TINY, "--img-size", "64", "--data", "imagefolder", "--data-dir", str(photos), "-b", "16", "--epochs", "2",
        "--mixup", "0.4", "--workers", "2", "--lr", "1e-4",
    ]  # fmt: skip
    for loader, number in (("cpu", "1"), ("gpu", str(devices))):
        flags = ["--devices", number, "--loader", loader, "-o", str(tmp_path / loader)]
        code, _, error = invoke("train", *few, *flags)
        assert code == 0, error
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)
    code, printed, error = invoke("train", *few, "--devices", "1", "--loader", "auto", "-o", str(tmp_path / "auto"))
    assert code == 0 and "loader      " in printed and "images/s" in printed, error
