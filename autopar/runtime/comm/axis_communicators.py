"""Communicators of the mesh axes over process groups, which `autopar.ops.collectives` calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ops import collectives
from autopar.runtime.comm.process_group import ProcessGroupTransport
from autopar.runtime.comm.protocols import TransportError
from autopar.runtime.comm.symmetric_collectives import SymmetricCommunicator


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


def without_bool(tensor: Tensor) -> Tensor:
    """A view in a dtype that Gloo can move."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def unused_model_name() -> str:
    """First of the names "model 0", "model 1", … under which no axis of this process is registered.

    Compiled code contains the keys of axes. So a model that follows a closed one shares its compiled code.
    """
    used = {key.rpartition(".")[0] for key in collectives.COMMUNICATORS}
    return next(name for name in map("model {}".format, itertools.count()) if name not in used)


def register_axes(model: str, mesh: Mesh, transport: ProcessGroupTransport) -> Mapping[str, str]:
    """Register a rank's communicator on each mesh axis with `autopar.ops.collectives`; returns the key of each axis.

    Axes with one rank have no communicator. Axes whose GPUs have peer access use symmetric memory.

    Args:
        model: part of the keys, which separates models of one process.
        transport: of this rank, with a process group for every group of the mesh.
    """
    keys = {}
    for axis in mesh.axes:
        members = mesh.group(transport.rank, axis)
        if len(members) == 1:
            continue
        rank, buffer = members.index(transport.rank), transport.symmetric_buffer(members)
        keys[axis] = f"{model}.{axis}"
        if buffer is None:
            collectives.register(keys[axis], GroupCommunicator(axis, members, rank, transport.groups[members]))
        else:
            collectives.register(keys[axis], SymmetricCommunicator(rank, len(members), buffer))
    return keys


def unregister(keys: Mapping[str, str]) -> None:
    """Remove the axes of a model; ``keys`` as `register_axes` returned them."""
    for key in keys.values():
        collectives.unregister(key)
