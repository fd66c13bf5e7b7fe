"""Verification of a checkpoint by one process, without the model and its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import HERE, Header
from autopar.runtime.checkpoint.folder import (
    check_hashes,
    check_sizes,
    is_checkpoint,
    read_header_alone,
)
from autopar.runtime.checkpoint.rank_state import EMA, MODEL, Training, state_key
from autopar.runtime.checkpoint.reshard_planners import read_metadata, read_training, saved_tensor


@dataclass(frozen=True)
class Verified:
    """A checkpoint, its header if that can be read, and the first fault that was found."""

    folder: Path
    header: Header | None
    fault: str | None


def verified(folder: Path) -> Verified:
    """Compare a checkpoint with its header, and the tensors in it with what a load needs."""
    header = None
    try:
        header = read_header_alone(folder)
        check_sizes(folder, header)
        check_hashes(folder, header)
        data = folder / header.data
        if header.data != HERE and is_checkpoint(data) and read_header_alone(data) != replace(header, data=HERE):
            raise CheckpointError(f"The headers of {folder} and {data} differ. Save the checkpoint again.")
        check_contents(data, header)
    except CheckpointError as error:
        return Verified(folder, header, str(error))
    return Verified(folder, header, None)


def check_contents(data: Path, header: Header) -> None:
    """Read everything but the tensors of a data folder, and check that files hold all of every tensor.

    Raises:
        CheckpointError: a file cannot be read, or a tensor or a part of it is missing.
    """
    metadata = read_metadata(data)
    training = read_training(data)
    for weight in header.weights:
        if tuple(saved_tensor(metadata, f"{MODEL}.{weight.name}").size) != weight.shape:
            raise CheckpointError(f"{data} has {weight.name} in another shape than its header. Use another checkpoint.")
    places = {(index.fqn, index.offset): place for index, place in (metadata.storage_data or {}).items()}
    for key in [*metadata.state_dict_metadata, *training_keys(training)]:
        check_whole(data, key, saved_tensor(metadata, key), places, header)


def training_keys(training: Training) -> Iterable[str]:
    """Keys of the tensors of optimizer and averages."""
    yield from (f"{EMA}.{name}" for name in training.ema)
    for name, state in training.states.items():
        yield from (state_key(name, key) for key in (*state.split, *state.whole))


def check_whole(
    data: Path, key: str, tensor: TensorStorageMetadata, places: Mapping[tuple[str, Any], Any], header: Header
) -> None:
    """Raise a CheckpointError unless the boxes of a tensor lie in it, fill it, and lie in the files.

    Args:
        places: place in the files of each box, by key and offsets.
    """
    filled = 0
    for box in tensor.chunks:
        place = places.get((key, box.offsets))
        inside = all(o >= 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, tensor.size, strict=True))
        if place is None or not inside or place.offset + place.length > header.files[place.relative_path].size:
            raise CheckpointError(f"{data} does not have all of {key} in its files. Use another checkpoint.")
        filled += prod(box.sizes)
    if filled != prod(tensor.size):
        raise CheckpointError(
            f"{data} has {filled:,} of {prod(tensor.size):,} elements of {key}. Use another checkpoint."
        )
