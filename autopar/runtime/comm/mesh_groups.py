"""Process groups of the mesh axes, and their communicators, which `autopar.ops.collectives` calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ops import collectives
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.comm.symmetric_collectives import SymmetricBufferPool, SymmetricCommunicator
from autopar.runtime.comm.symmetric_p2p import PeerAccess, have_peer_access


@dataclass(frozen=True)
class GroupCommunicator:
    """Communicator of one axis over torch.distributed; this process is number ``rank`` of ``members``."""

    axis: str
    members: tuple[int, ...]
    rank: int
    group: Any

    @property
    def ranks(self) -> int:
        return len(self.members)

    def symmetric(self, device: torch.device) -> SymmetricCommunicator:
        """Communicator of the same ranks over the symmetric memory of their GPUs; ``device`` is this rank's."""
        return SymmetricCommunicator(self.rank, self.ranks, SymmetricBufferPool(self.rank, device, self.group))

    def reserve(self, num_bytes: int) -> None:
        """Nothing: torch.distributed allocates its own memory."""

    def all_reduce(self, tensor: Tensor, overlapped: bool = False) -> None:
        with self.error_context("all-reduce"):
            dist.all_reduce(tensor, group=self.group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        stacked = tensor.new_empty([self.ranks, *tensor.shape])
        with self.error_context("all-gather"):
            dist.all_gather_into_tensor(without_bool(stacked), without_bool(tensor[None]), group=self.group)
        return stacked

    def reduce_scatter(self, stacked: Tensor, overlapped: bool = False) -> Tensor:
        part = stacked.new_empty(stacked.shape[1:])
        with self.error_context("reduce-scatter"):
            dist.reduce_scatter_tensor(part[None], stacked, group=self.group)
        return part

    def all_to_all(self, stacked: Tensor) -> Tensor:
        received = torch.empty_like(stacked)
        with self.error_context("all-to-all"):
            dist.all_to_all_single(without_bool(received), without_bool(stacked), group=self.group)
        return received

    def peer_order(self) -> list[int]:
        return [k for k in range(self.ranks) if k != self.rank]

    def publish(self, tensor: Tensor) -> Tensor:
        return self.all_gather(tensor)

    def unpublish(self) -> None:
        """Nothing: a gathered tensor belongs to its receiver."""

    def push_shard(self, rank: int, stacked: Tensor) -> None:
        """Nothing: all shards travel in `reduce_pushed`."""

    def reduce_pushed(self, stacked: Tensor) -> Tensor:
        return self.reduce_scatter(stacked)

    @contextmanager
    def error_context(self, what: str) -> Iterator[None]:
        """Context in which errors of torch.distributed name the collective, its axis and its ranks."""
        try:
            yield
        except RuntimeError as error:
            ranks = ", ".join(map(str, self.members))
            raise TransportError(f"{what} over axis {self.axis} (ranks {ranks}): {error}") from error


@dataclass(frozen=True)
class MeshGroups:
    """This process's communicator on each mesh axis with more than one rank; other axes need no process group."""

    communicators: Mapping[str, GroupCommunicator]

    def register(self, model: str, device: torch.device, peer_access: Sequence[PeerAccess] = ()) -> Mapping[str, str]:
        """Register all axes with `autopar.ops.collectives`; returns the key of each axis.

        Args:
            model: part of the keys, which separates models of one process.
            device: of this rank.
            peer_access: of all ranks; axes whose GPUs have peer access use symmetric memory. Empty: no axis does.
        """
        keys = {axis: f"{model}.{axis}" for axis in self.communicators}
        for axis, key in keys.items():
            communicator = self.communicators[axis]
            reachable = bool(peer_access) and have_peer_access([peer_access[rank] for rank in communicator.members])
            collectives.register(key, communicator.symmetric(device) if reachable else communicator)
        return keys

    def close(self) -> None:
        """Destroy the process groups; the default one stays."""
        for communicator in self.communicators.values():
            dist.destroy_process_group(communicator.group)


def unregister(keys: Mapping[str, str]) -> None:
    """Remove the axes of a model; ``keys`` as `MeshGroups.register` returned them."""
    for key in keys.values():
        collectives.unregister(key)


def without_bool(tensor: Tensor) -> Tensor:
    """A view in a dtype that Gloo can move."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def axis_ranks(mesh: Mesh) -> Mapping[str, Tensor]:
    """Rank sets of each axis with more than one rank, outermost axis first: [sets, ranks]."""
    sizes = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
    grid = torch.arange(mesh.devices).view(*sizes.values())
    return {axis: grid.movedim(dim, -1).reshape(-1, size) for dim, (axis, size) in enumerate(sizes.items()) if size > 1}


def connect_mesh_groups(mesh: Mesh, rank: int, timeout_seconds: float) -> MeshGroups:
    """Groups of a rank's mesh axes; all ranks of the default process group call at the same point.

    The groups are created one by one, in the same order on all ranks: init_device_mesh (torch 2.11 to 2.15) would give
    them torch's timeout of half an hour instead of the run's.

    Args:
        timeout_seconds: longest wait for a peer in one collective.
    """
    assert dist.get_world_size() == mesh.devices
    communicators: dict[str, GroupCommunicator] = {}
    for axis, sets in axis_ranks(mesh).items():
        for members in map(tuple, sets.tolist()):
            group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_seconds))
            if rank in members:
                communicators[axis] = GroupCommunicator(axis, members, members.index(rank), group)
    return MeshGroups(communicators)
