"""Connects a rank: the transport between ranks, the communicators of the mesh axes, and the rank on top of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.runtime.comm.axis_communicators import register_axes, unregister, unused_model_name
from autopar.runtime.comm.process_group import ProcessGroupTransport
from autopar.runtime.rank import Rank
from autopar.runtime.spec import RankSpec


def init_process_group(
    backend: str, rank: int, world: int, device: torch.device, timeout_seconds: float, store: dist.Store
) -> None:
    """Join the default process group; ranks meet in ``store``."""
    # Each directed pair has its own communicator, so the serialization that NCCL warns about cannot happen.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if backend == "nccl" else None,
    )


def connect_rank(
    spec: RankSpec, tensors: Mapping[str, torch.Tensor], timeout_seconds: float, opened: ExitStack
) -> Rank:
    """A rank with all its process groups; all processes of the default group call at the same point.

    Args:
        tensors: weights of the rank, as `Rank` takes them.
        opened: closes the groups at its exit, also after an error here, and the rank if it is still in use.
    """
    device = torch.device(spec.device)
    assert dist.get_world_size() == spec.mesh.devices
    transport = ProcessGroupTransport(
        spec.rank, device, spec.channels, spec.collective_groups, timeout_seconds, spec.transport,
        spec.checkpoint_seconds,
    )  # fmt: skip
    opened.callback(transport.close)
    keys = register_axes(unused_model_name(), spec.mesh, transport)
    opened.callback(unregister, keys)
    rank = Rank(spec, tensors, transport, keys, timeout_seconds=timeout_seconds)
    opened.callback(close_if_alive, weakref.ref(rank))  # the groups do not keep the memory of a dropped rank
    return rank


def close_if_alive(rank: weakref.ref[Rank]) -> None:
    """Close a rank that has not been freed."""
    alive = rank()
    if alive is not None:
        alive.close()
