"""Folder of a checkpoint that all ranks write their parts to, with one file of everything else.

The file, ``rest-<n>.ckpt``, is written first and old ones are removed last. ``checkpoint.json`` names it, so that the
folder holds one whole checkpoint at any moment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopar.api.checkpoint import read_header, read_weights
from autopar.api.prepare import PreparedModule, PreparedOptimizer
from autopar.errors import CheckpointError, UsageError
from autopar.ir.files import replacing
from autopar.train.rank_zero import is_rank_zero, run_on_rank_zero

REST = re.compile(r"rest-(\d+)\.ckpt")
KEY = "lightning"  # of the file's name, in the extra data of the header


@dataclass(frozen=True)
class Rest:
    """What a checkpoint holds besides the ranks' parts.

    Args:
        module, optimizer: names of the split model and its optimizer in the caller's state, or None.
        groups: options of the optimizer's parameter groups.
        state: everything else by name.
    """

    state: Mapping[str, Any]
    module: str | None = None
    optimizer: str | None = None
    groups: Sequence[Mapping[str, Any]] = ()


def is_folder(path: str | Path) -> bool:
    """Whether a checkpoint is a folder, and no file of Lightning's own."""
    return "://" not in str(path) and Path(path).is_dir()


def local(path: str | Path) -> Path:
    """A path of this machine.

    Raises:
        UsageError: it is the address of something else.
    """
    if "://" in str(path):
        raise UsageError(f"{path}: ranks write checkpoints to folders of mounted disks. Give the path of one.")
    return Path(path)


def save_folder(path: str | Path, module: PreparedModule, optimizer: PreparedOptimizer | None, rest: Rest) -> None:
    """Save a model with its optimizer, if it has one, and the rest; all ranks of a launcher call this.

    Raises:
        CheckpointError: as `ParallelModel.save_checkpoint`, or a file has the folder's name.
    """
    folder = local(path)
    if optimizer is not None:
        optimizer.send_options()  # a scheduler may have changed them since the last step
        rest = replace(rest, groups=[dict(own) for own in optimizer.sent])
    name = run_on_rank_zero(partial(write_rest, folder, rest), module.pm.broadcast_from_rank0)
    module.pm.save_checkpoint(folder, {KEY: name})
    if is_rank_zero():
        for other in folder.iterdir():
            if REST.fullmatch(other.name) and other.name != name:
                other.unlink()


def write_rest(folder: Path, rest: Rest) -> str:
    """Write the file of a checkpoint; returns its name, which no other file has.

    Raises:
        CheckpointError: the folder is a file, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and ranks write checkpoints to a folder. Give another path.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(match[1]) for other in folder.iterdir() if (match := REST.fullmatch(other.name))]
        name = f"rest-{max(numbers, default=0) + 1}.ckpt"
        with replacing(folder / name) as file:
            torch.save({**vars(rest), "groups": list(rest.groups), "state": dict(rest.state)}, file)
    except OSError as error:
        raise CheckpointError(
            f"Cannot save a checkpoint to {folder}: {error.strerror}. Make room, or give another folder."
        ) from error
    return name


def read_rest(path: str | Path, weights_only: bool | None = None) -> Rest:
    """What a checkpoint holds besides the ranks' parts.

    Args:
        weights_only: as for `torch.load`.

    Raises:
        CheckpointError: the folder has no checkpoint, or one that no strategy of Lightning saved.
    """
    extra = read_header(local(path)).extra
    name = extra.get(KEY) if isinstance(extra, dict) else None
    if not isinstance(name, str) or not REST.fullmatch(name) or not (local(path) / name).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of autopar, without the file that Lightning's strategies add. "
            "model.pm.load_checkpoint(path) loads it."
        )
    return Rest(**torch.load(local(path) / name, "cpu", weights_only=weights_only))


def load_folder(path: str | Path, module: PreparedModule, optimizer: PreparedOptimizer | None, rest: Rest) -> None:
    """Load a model, with its optimizer if it has one; all ranks of a launcher call this.

    Raises:
        CheckpointError: as `ParallelModel.load_checkpoint`, or the optimizer has other parameter groups.
    """
    if optimizer is not None:
        if len(rest.groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"The checkpoint in {path} has {len(rest.groups)} parameter groups, the optimizer "
                f"{len(optimizer.param_groups)}. Build it as the run that saved did."
            )
        optimizer.take_options(rest.groups)
        module.pm.set_group_options(optimizer.sent)  # before, since a load warns of other options
    module.pm.load_checkpoint(local(path))


def load_weights(path: str | Path, module: PreparedModule) -> None:
    """Load a model whose optimizer stays as it is; all ranks of a launcher call this. Raises as `read_weights`."""
    module.load_state_dict(read_weights(local(path)))
