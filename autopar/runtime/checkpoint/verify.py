"""Verification of a checkpoint by one process, without the model and its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import HERE, Header
from autopar.runtime.checkpoint.folder import (
    TRAINING,
    check_hashes,
    check_sizes,
    is_checkpoint,
    kept,
    read_header_alone,
)
from autopar.runtime.checkpoint.rank_state import EMA, MODEL, Training, decoded_training, described, state_key
from autopar.runtime.checkpoint.reshard_planners import read_metadata, saved_tensor


@dataclass(frozen=True)
class Verified:
    """A checkpoint, its header if that can be read, and the first fault that was found."""

    folder: Path
    header: Header | None
    fault: str | None


def verified_with_kept(folder: Path) -> list[Verified]:
    """A checkpoint and those that are kept with it, the newest first."""
    return [verified(checkpoint) for checkpoint in (folder, *kept(folder))]


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
    try:
        training = decoded_training((data / TRAINING).read_bytes())
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(f"{data / TRAINING} is damaged: {described(error)}. Use another checkpoint.") from error
    for weight in header.weights:
        if tuple(saved_tensor(metadata, f"{MODEL}.{weight.name}").size) != weight.shape:
            raise CheckpointError(f"{data} has {weight.name} in another shape than its header. Use another checkpoint.")
    for key in [*metadata.state_dict_metadata, *training_keys(training)]:
        check_whole(data, key, metadata, header)


def training_keys(training: Training) -> Iterable[str]:
    """Keys of the tensors of optimizer and averages."""
    yield from (f"{EMA}.{name}" for name in training.ema)
    for name, state in training.states.items():
        yield from (state_key(name, key) for key in (*state.split, *state.whole))


def check_whole(data: Path, key: str, metadata: Metadata, header: Header) -> None:
    """Raise a CheckpointError unless the boxes of a tensor lie in it, fill it, and lie in the files."""
    tensor = saved_tensor(metadata, key)
    places = {(index.fqn, index.offset): place for index, place in (metadata.storage_data or {}).items()}
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
