"""The process groups of a rank: those of the mesh axes, and those that only the runtime uses."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.runtime.axes import Axes, axis_ranks, connect, unregister
from autopar.runtime.rank import Rank
from autopar.runtime.spec import RankSpec
from autopar.runtime.transport import ProcessGroupTransport

MODELS = itertools.count()  # keeps the axes of models that share a process apart


def init_process_group(
    backend: str, rank: int, world: int, device: torch.device, timeout_seconds: float, store: dist.Store
) -> None:
    """Join the default process group; the ranks find each other in ``store``."""
    # Each directed pair has a communicator of its own here, so what NCCL warns about cannot happen.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if backend == "nccl" else None,
    )


class ConnectedRank:
    """A rank with all its process groups in the default one; every process makes its own at the same point."""

    def __init__(self, spec: RankSpec, tensors: Mapping[str, torch.Tensor], timeout_seconds: float) -> None:
        """Connect, and take the weights as `Rank` does."""
        device = torch.device(spec.device)
        self.axes: Axes = connect(spec.mesh, spec.rank, device.type, timeout_seconds)
        on_axes = [tuple(ranks) for sets in axis_ranks(spec.mesh).values() for ranks in sets.tolist()]
        own = {c.members: c.group for c in self.axes.communicators.values()}
        made = {ranks: own.get(ranks) for ranks in on_axes}
        self.transport = ProcessGroupTransport(
            spec.rank, device, spec.channels, spec.shared, made, timeout_seconds, spec.transport
        )
        self.keys = self.axes.register(f"model {next(MODELS)}", device, self.transport.neighbours)
        self.rank = Rank(spec, tensors, self.transport, self.keys)

    def close(self) -> None:
        """Give up the groups; the default one stays."""
        self.rank.close()
        unregister(self.keys)
        self.transport.close()
        self.axes.close()
