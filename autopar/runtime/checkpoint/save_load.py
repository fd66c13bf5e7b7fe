"""Save and load of a checkpoint on one rank; all ranks of a mesh make the same calls.

An error on one rank reaches all ranks. It is returned instead of raised if no state has changed, so that training can
continue.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import SEE_DOCTOR, CheckpointError
from autopar.ir.checkpoint_header import Header
from autopar.ir.units import BYTES, text
from autopar.runtime.checkpoint.folder import check_hashes, check_sizes, is_checkpoint, on_all_nodes, read_header
from autopar.runtime.checkpoint.rank_state import (
    EMA,
    MODEL,
    CheckpointedRank,
    OptionChange,
    ShardedTensor,
    described,
    rank_state,
    whole_tensor,
)
from autopar.runtime.checkpoint.reshard_planners import (
    DataReader,
    FolderWriter,
    PartsLoadPlanner,
    PartsSavePlanner,
    read_metadata,
    saved_tensor,
)
from autopar.runtime.checkpoint.restore import Restore
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.spec import RankSpec, rank_text


def save(rank: CheckpointedRank, folder: str, header: Header, keep: int) -> CheckpointError | None:
    """Write a checkpoint; every rank writes its part. Returns the error if the save fails.

    Args:
        header: without the fields that only the ranks know; the coordinator fills them.
        keep: number of checkpoints to keep in the folder, with this one.
    """
    target = Path(folder)
    planner = PartsSavePlanner(partial(rank_state, rank))
    writer = FolderWriter(target, header, planner, keep)
    try:
        with collective():
            dcp.save({}, storage_writer=writer, planner=planner, **ranks_of(rank))
    except CheckpointException as exception:
        return not_saved(rank.spec, target, writer.needed_bytes, exception)
    finally:
        writer.close()
    return None


def inspect(folder: str, part: int, parts: int) -> Header | CheckpointError:
    """Header of a checkpoint whose files are as they were saved, or the error that this rank finds.

    Args:
        part, parts: this rank's part of the files, whose hashes it checks.
    """
    try:
        header = read_header(Path(folder))
        check_sizes(Path(folder), header)
        check_hashes(Path(folder), header, part, parts)
        read_metadata(Path(folder) / header.data)
    except CheckpointError as error:
        return error
    return header


def load(rank: CheckpointedRank, folder: str, header: Header) -> CheckpointError | list[OptionChange]:
    """Load a checkpoint that `inspect` found complete on all ranks. Returns changed optimizer options, or the error.

    Raises:
        CheckpointError: a file could not be read after others were; the rank's state is part old and part new.
    """
    data = Path(folder) / header.data
    restore = Restore(rank, data, header)
    planner = PartsLoadPlanner(restore.wanted)
    try:
        with collective():
            dcp.load({}, storage_reader=DataReader(data), planner=planner, **ranks_of(rank))
    except CheckpointException as exception:
        number, error = cause(exception)
        if isinstance(error, CheckpointError) and not planner.reads:
            return error
        where = rank_text(rank.spec.mesh, number, rank.spec.placement)
        text = f"Cannot load the checkpoint in {folder}: {described(error)} on {where}."
        if not planner.reads:
            return CheckpointError(f"{text} The model is as it was. Use another checkpoint.")
        raise CheckpointError(
            f"{text} Some weights were replaced, others not, so the model was closed. Call autopar.parallelize again. "
            "If a run was saving there, load the same folder; else use another checkpoint."
        ) from error
    changes = restore.option_changes()
    restore.apply()
    return changes


def read_tensors(data: Path, names: Iterable[str], ema: bool) -> dict[str, torch.Tensor]:
    """Whole weights by name, read by this process alone.

    Args:
        ema: whether to read the moving average of a weight that has one, instead of the weight.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    weights: dict[str, torch.Tensor] = {}

    def wanted(metadata: Metadata) -> list[ShardedTensor]:
        pieces = []
        for name in names:
            averaged = ema and f"{EMA}.{name}" in metadata.state_dict_metadata
            key = f"{EMA if averaged else MODEL}.{name}"
            saved = saved_tensor(metadata, key)
            weights[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            pieces.append(whole_tensor(key, weights[name]))
        return pieces

    try:
        with quiet():
            dcp.load({}, storage_reader=DataReader(data), planner=PartsLoadPlanner(wanted), no_dist=True)
    except CheckpointException as exception:
        _, error = cause(exception)
        if isinstance(error, CheckpointError):
            raise error from exception
        raise CheckpointError(f"Cannot read {data}: {described(error)}. Use another checkpoint.") from exception
    return weights


def ranks_of(rank: CheckpointedRank) -> dict[str, Any]:
    """Arguments of torch's save and load for the ranks that take part."""
    return {"process_group": rank.checkpoint_group, "no_dist": rank.spec.mesh.devices == 1}


@contextmanager
def collective() -> Iterator[None]:
    """Context for calls in which ranks exchange objects: a lost peer raises TransportError."""
    try:
        with quiet():
            yield
    except RuntimeError as error:
        raise TransportError(f"a checkpoint's plan: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Context without torch's warning that a single process does not use torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def cause(exception: CheckpointException) -> tuple[int, Exception]:
    """Rank and exception of the most informative failure: a CheckpointError first, then an OSError.

    Raises:
        BaseException: the exception is no failure, such as Ctrl-C.
    """
    order: list[Callable[[Any], bool]] = [
        lambda error: not isinstance(error, CheckpointError),
        lambda error: not isinstance(error, OSError),
    ]
    errors = sorted((tuple(is_not(e) for is_not in order), rank) for rank, (e, _) in exception.failures.items())
    number = errors[0][1]
    error = exception.failures[number][0]
    if not isinstance(error, Exception):
        raise error
    return number, error


def not_saved(spec: RankSpec, folder: Path, needed_bytes: int, exception: CheckpointException) -> CheckpointError:
    """Error for a checkpoint that could not be saved."""
    number, error = cause(exception)
    if isinstance(error, CheckpointError):
        return error
    before = "The one that was there is as it was. " if is_checkpoint(folder) else ""
    if isinstance(error, FileExistsError | NotADirectoryError):
        remedy = f"{before}A file or a broken link is there: choose another folder, and save again."
    elif isinstance(error, OSError):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = text(shutil.disk_usage(existing).free, BYTES)
        needed = f"It needs {text(needed_bytes, BYTES)}, {free} are free there. " if needed_bytes else ""
        nodes = on_all_nodes() if isinstance(error, FileNotFoundError) else ""
        remedy = f"{needed}{before}Make room, or choose another folder{nodes}, and save again. {SEE_DOCTOR}"
    else:
        remedy = f"{before}Training can go on; mend the state_dict() of the optimizer or the scheduler that raised it."
    return CheckpointError(
        f"Cannot save a checkpoint to {folder}: {described(error)} on "
        f"{rank_text(spec.mesh, number, spec.placement)}. {remedy}"
    )
