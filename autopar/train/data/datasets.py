"""Data sets by name: their training and test images, and where the files are expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import UsageError, suggest
from autopar.ir.units import plural
from autopar.runtime.launch.environment import launched
from autopar.train.data.hf import read_hf
from autopar.train.data.images import Arrays, Files, Images, Noise
from autopar.train.data.streams import Parts, Stream, first, num_images
from autopar.train.data.transforms import RANDOM, Augmentation, Format, image_format
from autopar.train.data.wanted import Selection, Wanted
from autopar.train.data.wds import read_shards
from autopar.train.timm_optional import needed

TEST_SHARE = 0.2
DIGITS_MAX_PIXEL = 16.0  # largest value of a pixel
# Mean and deviation of pixels in 0 … 1: of the digits, and of CIFAR as torchvision's reference scripts have them.
DIGITS_MEAN, DIGITS_STD = (0.305,), (0.376,)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# As in timm's training script.
PHOTO_FORMAT: Mapping[str, Any] = {"interpolation": "bicubic", "crop_pct": 0.875}
PHOTO_AUGMENTATION = Augmentation(
    scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.4, train_interpolation=RANDOM
)
SYNTHETIC_CLASSES = 10
SYNTHETIC_TRAINING, SYNTHETIC_TEST = 512, 128
TRAINING_FOLDER, TEST_FOLDERS = "train", ("val", "validation", "test")


@dataclass(frozen=True)
class Data:
    """A data set in two parts.

    Args:
        form: format to which its images are converted.
        augmentation: the usual augmentation for training on such images.
    """

    name: str
    train: Images | Stream
    test: Images | Stream
    num_classes: int
    form: Format
    augmentation: Augmentation

    def __str__(self) -> str:
        channels, side, _ = self.form.shape
        return (
            f"{self.name}: {num_images(self.train):,} training and {plural(num_images(self.test), 'test image')} of "
            f"{channels}×{side}×{side}, {plural(self.num_classes, 'class', 'es')}"
        )


def load_data(name: str, wanted: Wanted) -> Data:
    """A data set by name; of ``hf:`` and ``wds:`` with what these read.

    Raises:
        UsageError: the name is unknown (names near matches), files are missing (names the folder where they belong),
            or a library is missing.
    """
    library, colon, source = name.partition(":")
    if colon and source and library in LIBRARIES:
        return library_data(name, LIBRARIES[library](source, wanted), wanted)
    if wanted.selection != Selection():
        given = [key for key, value in asdict(wanted.selection).items() if value not in (None, False)]
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        raise UsageError(f"{flags} is for data sets hf:NAME and wds:SHARDS alone. Leave it out with --data {name}.")
    if name not in DATASETS:
        known = (*DATASETS, "hf:NAME", "wds:SHARDS")
        hint = suggest(name, DATASETS, 2, cutoff=0.4)
        raise UsageError(f"No data set is named {name!r}.{hint} There is {', '.join(known)}.")
    data = DATASETS[name](wanted)
    train, test = first(data.train, wanted.num_train), first(data.test, wanted.num_test)
    return Data(name, train, test, data.num_classes, data.form, data.augmentation)


def format_of(
    wanted: Wanted, mean: Sequence[float], std: Sequence[float], interpolation: str = "bilinear", crop_pct: float = 1.0
) -> Format:
    """Format with what is wanted, and else with what is usual for the data set."""
    usual = {"mean": tuple(mean), "std": tuple(std), "interpolation": interpolation, "crop_pct": crop_pct}
    given = {name: getattr(wanted, name) for name in (*usual, "crop_mode") if getattr(wanted, name) is not None}
    return image_format(wanted.channels, wanted.side, **usual | given)


def library_data(name: str, parts: Parts, wanted: Wanted) -> Data:
    """Images that a library reads, with ImageNet's statistics and augmentation unless others are wanted.

    Raises:
        UsageError: the library needs no folder and downloads by itself.
    """
    if wanted.folder is not None or wanted.download:
        flag = "--download" if wanted.download else f"--data-dir {wanted.folder}"
        raise UsageError(f"Data set {name!r} says itself where its files are. Leave {flag} out.")
    train, test = first(parts.train, wanted.num_train), first(parts.test, wanted.num_test)
    form = format_of(wanted, IMAGENET_MEAN, IMAGENET_STD, **PHOTO_FORMAT)
    return Data(name, train, test, parts.num_classes, form, PHOTO_AUGMENTATION)


def digits_data(wanted: Wanted) -> Data:
    """Handwritten digits: 1,797 grey images of 8×8 from the UCI repository; a fifth of each class are test images."""
    refuse_files("digits", wanted)
    loaded = needed("sklearn.datasets", "Data set 'digits'", "scikit-learn").load_digits()
    pixels, labels = np.rint(loaded.images * (255 / DIGITS_MAX_PIXEL)).astype(np.uint8), loaded.target
    test = stratified(labels, TEST_SHARE, wanted.seed)
    train_part, test_part = (Arrays(pixels[mask], labels[mask].tolist()) for mask in (~test, test))
    form = format_of(wanted, DIGITS_MEAN, DIGITS_STD)
    return Data("digits", train_part, test_part, 10, form, Augmentation())


def stratified(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A random mask, [samples], that is true for this share of each class."""
    generator = np.random.default_rng(seed)
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        mask[generator.permutation(members)[: round(share * len(members))]] = True
    return mask


def synthetic_data(wanted: Wanted) -> Data:
    """Random images with random labels, for trials: a model can only memorize them."""
    refuse_files("synthetic", wanted)
    generator = np.random.default_rng(wanted.seed)
    counts = (wanted.num_train or SYNTHETIC_TRAINING, wanted.num_test or SYNTHETIC_TEST)
    train, test = (
        Noise(generator.integers(0, SYNTHETIC_CLASSES, count).tolist(), wanted.side, wanted.seed, stream)
        for stream, count in enumerate(counts)
    )
    form = format_of(wanted, (0.5,) * 3, (0.29,) * 3)
    return Data("synthetic", train, test, SYNTHETIC_CLASSES, form, Augmentation())


def cifar(
    kind: str, classes: int, folder: str, mean: tuple[float, ...], std: tuple[float, ...], wanted: Wanted
) -> Data:
    """CIFAR's 50,000 training and 10,000 test images of 32×32, which torchvision reads from the Python files."""
    name = kind.lower()
    root = wanted.folder or Path("data")
    source = getattr(needed("torchvision.datasets", f"Data set {name!r}"), kind)
    if not wanted.download and not (root / folder).is_dir():
        raise UsageError(
            f"Data set {name!r} is not in {root}: there is no folder {root / folder}. Put the unpacked {source.url} "
            f"there (files {', '.join(file for file, _ in source.test_list)}, …), say where it is with "
            "--data-dir, or add --download."
        )
    launch = launched()
    if wanted.download and launch is not None:
        raise UsageError(
            f"--download under torchrun: {launch.world} processes would write the same files in {root}. Fetch them "
            f"once before, with python -c \"import torchvision; torchvision.datasets.{kind}('{root}', download=True)\"."
        )
    train, test = (read_cifar(source, root, is_train, wanted.download, name) for is_train in (True, False))
    form = format_of(wanted, mean, std)
    augmentation = Augmentation(shift=wanted.side // 8, hflip=0.5)  # 4 of 32 pixels, as is usual in papers
    return Data(name, train, test, classes, form, augmentation)


def read_cifar(source: Any, root: Path, train: bool, download: bool, name: str) -> Arrays:
    """Training or test images of CIFAR.

    Raises:
        UsageError: a file is missing or damaged, or the download failed.
    """
    try:
        part = source(str(root), train=train, download=download)
    except OSError as error:
        raise UsageError(
            f"Data set {name!r} could not be fetched from {source.url} into {root}: {error}. "
            "Without a network, put the unpacked archive there by other means."
        ) from error
    except RuntimeError as error:
        raise UsageError(
            f"Data set {name!r} in {root} is incomplete or damaged: a file of {source.base_folder} is missing or has "
            "another checksum. Unpack the archive again, or remove the folder and add --download."
        ) from error
    return Arrays(part.data, list(part.targets))


def image_folder(wanted: Wanted) -> Data:
    """Images in one folder per class, under ``train`` and ``val``."""
    layout = "FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE"
    if wanted.download:
        raise UsageError("Data set 'imagefolder' is your own files; nothing can be downloaded. Leave --download out.")
    if wanted.folder is None:
        raise UsageError(f"Data set 'imagefolder' needs --data-dir FOLDER, with images as {layout}.")
    tests = [wanted.folder / name for name in TEST_FOLDERS if (wanted.folder / name).is_dir()]
    if not (wanted.folder / TRAINING_FOLDER).is_dir() or not tests:
        tried = [TRAINING_FOLDER] if not (wanted.folder / TRAINING_FOLDER).is_dir() else list(TEST_FOLDERS)
        raise UsageError(
            f"Data set 'imagefolder' is not in {wanted.folder}: there is no folder "
            f"{' or '.join(str(wanted.folder / name) for name in tried)}. Images must lie as {layout}."
        )
    classes, train = read_folder(wanted.folder / TRAINING_FOLDER, layout)
    test_classes, test = read_folder(tests[0], layout)
    if classes != test_classes:
        other = sorted(set(classes) ^ set(test_classes))
        raise UsageError(
            f"Data set 'imagefolder': {wanted.folder / TRAINING_FOLDER} has {plural(len(classes), 'class', 'es')}, "
            f"{tests[0]} has {len(test_classes)}; only one of them has {', '.join(other[:3])}. Use the same class "
            "folders in both."
        )
    form = format_of(wanted, IMAGENET_MEAN, IMAGENET_STD, **PHOTO_FORMAT)
    return Data("imagefolder", train, test, len(classes), form, PHOTO_AUGMENTATION)


def read_folder(folder: Path, layout: str) -> tuple[list[str], Files]:
    """Class names in order, and the images of a folder of class folders.

    Raises:
        UsageError: there is no class folder, or one without images.
    """
    try:
        found = needed("torchvision.datasets", "Data set 'imagefolder'").ImageFolder(str(folder))
    except OSError as error:
        raise UsageError(f"Data set 'imagefolder': {error}. Images must lie as {layout}.") from error
    return found.classes, Files([path for path, _ in found.samples], found.targets)


def refuse_files(name: str, wanted: Wanted) -> None:
    """Refuse --data-dir and --download for a data set without files."""
    if wanted.folder is not None or wanted.download:
        flag = "--download" if wanted.download else f"--data-dir {wanted.folder}"
        raise UsageError(f"Data set {name!r} needs no files. Leave {flag} out.")


DATASETS: Mapping[str, Callable[[Wanted], Data]] = {
    "digits": digits_data,
    "cifar10": partial(cifar, "CIFAR10", 10, "cifar-10-batches-py", CIFAR10_MEAN, CIFAR10_STD),
    "cifar100": partial(cifar, "CIFAR100", 100, "cifar-100-python", CIFAR100_MEAN, CIFAR100_STD),
    "imagefolder": image_folder,
    "synthetic": synthetic_data,
}
LIBRARIES: Mapping[str, Callable[[str, Wanted], Parts]] = {"hf": read_hf, "wds": read_shards}
# Whether the data set, not the model, decides the size of the images.
OF_OWN_SIZE = ("digits", "cifar10", "cifar100")
