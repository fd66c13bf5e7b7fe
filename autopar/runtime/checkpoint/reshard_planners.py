"""Resharding planners for torch.distributed.checkpoint: the boxes of each tensor that each rank writes and reads.

On disk a tensor is a list of boxes, for every mesh. A rank reads the saved boxes that overlap its own boxes. torch's
default planners choose the rank that writes a box and check that boxes cover their tensors. Their hook for tensor
classes (`__create_write_items__`) is private and takes only subclasses of Tensor, so boxes are named here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.errors import CheckpointError
from autopar.ir.checkpoint_header import Header, SavedFile
from autopar.ir.units import of_type
from autopar.runtime.checkpoint.folder import LISTED, METADATA, TRAINING, Save, sha256
from autopar.runtime.checkpoint.rank_state import (
    RankState,
    ShardedTensor,
    Training,
    decoded_training,
    described,
    encoded_training,
    merged,
)

# The metadata file is a pickle and needs only these names. Other names in it do not come from a save.
METADATA_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype))},
}  # fmt: skip


class PartsSavePlanner(DefaultSavePlanner):
    """Offers a rank's tensor parts. The coordinator assigns each box to one of the ranks that offer it."""

    def __init__(self, offer: Callable[[], RankState]) -> None:
        """Planner of one save.

        Args:
            offer: returns the rank's state. It is called where an exception reaches all ranks.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.offer = offer
        self.pieces: dict[str, ShardedTensor] = {}
        self.training: Training | None = None  # merged over all ranks; on the coordinator only
        self.encoded = b""

    def create_local_plan(self) -> SavePlan:
        offer = self.offer()
        self.pieces = {piece.key: piece for piece in offer.tensors}
        items = [write_item(piece, number) for piece in offer.tensors for number in range(len(piece.chunks))]
        return SavePlan(items, planner_data=offer.training)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.training = merged([plan.planner_data for plan in all_plans])
        self.encoded = encoded_training(self.training)
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        piece = self.pieces[index.fqn]
        pairs = zip(piece.chunks, piece.views, strict=True)
        return next(view for chunk, view in pairs if chunk.whole == index.offset).detach()


def write_item(piece: ShardedTensor, number: int) -> WriteItem:
    """Write item for box ``number`` of a tensor part."""
    chunk = piece.chunks[number]
    offsets, sizes = torch.Size(chunk.whole), torch.Size(chunk.sizes)
    return WriteItem(
        MetadataIndex(piece.key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.shape)
        ),
    )


def num_bytes(item: WriteItem) -> int:
    """Bytes that a write item writes."""
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class RankWrites(list[WriteResult]):
    """Write results of one rank, as torch passes them to the coordinator, with the files that the rank wrote."""

    def __init__(self, results: list[WriteResult], files: Mapping[str, SavedFile]) -> None:
        super().__init__(results)
        self.files = files


class FolderWriter(FileSystemWriter):
    """Writes into a data folder, and commits the folder as the checkpoint once every rank has written."""

    def __init__(self, folder: Path, header: Header, planner: PartsSavePlanner, keep: int) -> None:
        # Copying ahead would initialize CUDA in processes that compute on CPU on a machine with GPUs.
        super().__init__(folder, per_thread_copy_ahead=0)
        self.folder, self.header, self.planner, self.keep = folder, header, planner, keep
        self.save: Save | None = None  # on the coordinator only
        self.needed_bytes = 0

    def storage_meta(self) -> StorageMeta:
        """Storage metadata without the path, which becomes wrong once the folder moves."""
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the coordinator creates the folder in `prepare_global_plan`

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.needed_bytes = sum(num_bytes(item) for plan in plans for item in plan.items) + len(self.planner.encoded)
        self.save = Save(self.folder, self.needed_bytes)
        prepared = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=(self.save.data, plan.storage_data)) for plan in prepared]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.path, prefix = plan.storage_data
        results = super().write_data(replace(plan, storage_data=prefix), planner).value()
        paths = [Path(self.path) / name for name in {result.storage_data.relative_path for result in results}]
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            RankWrites(results, {path.name: SavedFile(path.stat().st_size, sha256(path)) for path in paths})
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save, training = self.save, self.planner.training
        assert save is not None and training is not None
        files: dict[str, SavedFile] = {}
        for of_rank in results:
            assert isinstance(of_rank, RankWrites)
            files |= of_rank.files
        written_bytes = sum(file.size for file in files.values())
        present_bytes = sum(path.stat().st_size for path in save.data.iterdir())
        if written_bytes != present_bytes:
            raise CheckpointError(
                f"The ranks wrote {written_bytes:,} bytes, {present_bytes:,} of them are in {save.data} on the first "
                "rank's node. Save to a folder on a disk that all nodes share."
            )
        super().finish(metadata, results)
        (save.data / TRAINING).write_bytes(self.planner.encoded)
        save.commit(
            replace(
                self.header,
                optimizer=training.optimizer,
                scheduler=training.scheduler,
                scaler=training.scaler_state is not None,
                ema=bool(training.ema),
            ),
            files,
            self.keep,
        )

    def close(self) -> None:
        """Remove the data folder if the save was not committed."""
        if self.save is not None:
            self.save.close()


class PartsLoadPlanner(DefaultLoadPlanner):
    """Fills a rank's tensor parts from the saved boxes."""

    def __init__(self, wanted: Callable[[Metadata], Sequence[ShardedTensor]]) -> None:
        """Planner of one load.

        Args:
            wanted: returns the parts to fill, given the metadata. It is called where an exception reaches all ranks.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.wanted = wanted
        self.pieces: Sequence[ShardedTensor] = ()
        self.reads = False  # whether all ranks have plans, and this one has begun to fill its parts

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        self.pieces = self.wanted(self.metadata)
        return LoadPlan([item for k in range(len(self.pieces)) for item in self.read_items(k, self.metadata)])

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.reads = True
        return super().finish_plan(central_plan)

    def read_items(self, number: int, metadata: Metadata) -> list[ReadItem]:
        """Read items that fill part ``number``. They name the part by its number: two parts may be of one tensor."""
        piece = self.pieces[number]
        saved = saved_tensor(metadata, piece.key)
        if tuple(saved.size) != tuple(piece.shape):
            raise CheckpointError(
                f"The checkpoint has {piece.key} of shape {list(saved.size)}, it is {list(piece.shape)} here. "
                "Load it with the model and optimizer that it was saved from."
            )
        items = []
        for k, chunk in enumerate(piece.chunks):
            box = ChunkStorageMetadata(torch.Size(chunk.whole), torch.Size(chunk.sizes))
            reads = create_read_items_for_chunk_list(piece.key, saved, [box])
            if sum(prod(item.lengths) for item in reads) != chunk.numel:
                raise CheckpointError(f"The checkpoint's metadata has not all of {piece.key}. Use another checkpoint.")
            items += [replace(item, dest_index=MetadataIndex(str(number), (k,))) for item in reads]
        return items

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise AssertionError(f"{read_item} is no tensor")  # the default planner would unpickle any object

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        piece = self.pieces[int(index.fqn)]
        assert index.offset is not None
        return piece.views[index.offset[0]]


def saved_tensor(metadata: Metadata, key: str) -> TensorStorageMetadata:
    """Metadata of a saved tensor.

    Raises:
        CheckpointError: the checkpoint has no such tensor.
    """
    tensor = metadata.state_dict_metadata.get(key)
    if not isinstance(tensor, TensorStorageMetadata):
        raise CheckpointError(f"The checkpoint's metadata has no tensor {key}. Use another checkpoint.")
    return tensor


class DataReader(FileSystemReader):
    """Reads a data folder. Refuses a metadata file with names outside of `METADATA_TYPES`."""

    def read_metadata(self) -> Metadata:
        return read_metadata(Path(self.path))


class MetadataUnpickler(pickle.Unpickler):
    """Loads only the types in `METADATA_TYPES`."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name not in METADATA_TYPES.get(module_name, ()):
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def read_metadata(data: Path) -> Metadata:
    """Metadata of a data folder: its tensors and the places of their boxes.

    Raises:
        CheckpointError: the file is damaged or was not written by a save.
    """
    try:
        metadata = MetadataUnpickler(BytesIO((data / METADATA).read_bytes())).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{data / METADATA} is damaged: {error}. Use another checkpoint.") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{data / METADATA} holds {of_type(metadata)}. Use another checkpoint.")
    for place in (metadata.storage_data or {}).values():
        if not LISTED.fullmatch(place.relative_path):
            raise CheckpointError(
                f"{data / METADATA} is damaged: it names {place.relative_path!r}, which no save writes. Use another "
                "checkpoint."
            )
    return metadata


def read_training(data: Path) -> Training:
    """State other than tensors in a data folder.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        return decoded_training((data / TRAINING).read_bytes())
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(f"{data / TRAINING} is damaged: {described(error)}. Use another checkpoint.") from error
