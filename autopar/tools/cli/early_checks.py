"""Checks that need no torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import UsageError, suggest

DATASETS = ("digits", "cifar10", "cifar100", "imagefolder", "synthetic")  # of `autopar.train`, which imports torch
WITHOUT_FILES = ("digits", "synthetic")
LIBRARIES = {"hf": "hf:NAME", "wds": "wds:SHARDS"}


def check_request(model: str, devices: int | None, batch: int, constraints: Mapping[str, Any]) -> None:
    """Refuse what no model and no machine can make right: an unknown name of a model or a cost model, and constraints
    that are impossible for so many devices and samples.

    Args:
        devices: None if the machine decides; then constraints are compared with one another alone.

    Raises:
        UsageError: names the flag or the model.
    """
    from autopar.api.model_names import check_known
    from autopar.api.options import Options
    from autopar.cost.hardware.load import load_hardware

    options = Options.of(constraints)
    if devices is not None:
        check_mesh(devices, batch, constraints)
    if options.hardware is not None:
        load_hardware(options.hardware)
    check_known(model)


def check_mesh(devices: int, batch: int, constraints: Mapping[str, Any]) -> None:
    """Raise a UsageError if constraints are impossible for so many devices and samples."""
    from autopar.api.options import Options
    from autopar.solve.space.meshes import check_sizes

    check_sizes(Options.of(constraints).constraints(devices, batch))


def check_data(name: str, folder: Path | None, download: bool) -> None:
    """Refuse an unknown data set, and a missing folder, as `autopar.train.load_data` does later.

    Args:
        folder, download: the values of ``--data-dir`` and ``--download``.

    Raises:
        UsageError: names near matches, or the flag.
    """
    library, _, source = name.partition(":")
    if source and library in LIBRARIES:
        return
    if name not in DATASETS:
        hint = suggest(name, DATASETS, 2, cutoff=0.4)
        known = (*DATASETS, *LIBRARIES.values())
        raise UsageError(f"No data set is named {name!r}.{hint} There is {', '.join(known)}.")
    if download or name in WITHOUT_FILES:
        return
    if folder is None and name == "imagefolder":
        layout = "FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE"
        raise UsageError(f"Data set 'imagefolder' needs --data-dir FOLDER, with images as {layout}.")
    if folder is not None and not folder.is_dir():
        remedy = "Give the folder of the files" + ("." if name == "imagefolder" else ", or add --download.")
        raise UsageError(f"--data-dir {folder}: there is no such folder. {remedy}")
