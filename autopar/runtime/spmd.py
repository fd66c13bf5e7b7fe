"""This process is a rank: alone, or one of those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.runtime.rank import Rank, RankSpec
from autopar.runtime.transport import Hub, LocalTransport, ProcessGroupTransport, init_process_group

# Commands whose result every rank already has, so that nothing needs to be gathered after a step.
REPLICATED = frozenset({"add_program", "optimizer_step", "zero_grad", "scheduler_step", "load"})


@dataclass(frozen=True)
class Launched:
    """What torchrun told this process."""

    rank: int
    world: int
    local_rank: int


def launched() -> Launched | None:
    """What torchrun's environment says of this process, or None in a plain script."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = int(os.environ["RANK"])
    return Launched(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))


class LocalRanks:
    """A single rank in this process: no workers, no copies of inputs."""

    def __init__(self, spec: RankSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self.failed: str | None = None
        self.rank = Rank(spec, tensors, LocalTransport(spec.rank, Hub()))

    def call(self, name: str, arguments: Sequence[tuple]) -> dict[int, Any]:
        """Run one command here."""
        if self.failed is not None:
            raise UsageError(f"This model was closed: {self.failed} Call autopar.parallelize again.")
        return {0: getattr(self.rank, name)(*arguments[0])}

    def close(self) -> None:
        self.failed = "close() was called."


class TorchrunRanks:
    """This process's rank among those of a launcher; every rank makes the same calls in the same order.

    An exception carries the rank and action as a note and is left to the launcher, which ends the other ranks.
    """

    def __init__(self, spec: RankSpec, tensors: Mapping[str, torch.Tensor], backend: str, timeout_seconds: float) -> None:
        """Join the process group (the caller's own if there is one) and take rank 0's weights."""
        self.failed: str | None = None
        device = torch.device(spec.device)
        self.joined = not dist.is_initialized()
        if self.joined:
            init_process_group(backend, spec.rank, spec.world, device, timeout_seconds)
        self.control = dist.new_group(backend="gloo")  # for objects, whatever carries the tensors
        own = {weight.name for weight in spec.weights}
        received = {}
        for name, tensor in sorted(tensors.items()):
            copy = tensor.detach().cpu().contiguous().clone()
            dist.broadcast(copy, 0, group=self.control)
            if name in own:
                received[name] = copy
        self.rank = Rank(spec, received, ProcessGroupTransport(spec.rank, device, spec.edges, spec.shared))

    def call(self, name: str, arguments: Sequence[tuple]) -> dict[int, Any]:
        """Run one command on this rank; the results of all ranks, or this one's where all have the same."""
        if self.failed is not None:
            raise UsageError(f"This model was closed: {self.failed} Call autopar.parallelize again.")
        number = self.rank.spec.rank
        try:
            result = getattr(self.rank, name)(*arguments[number])
        except Exception as error:
            action = self.rank.running.current if self.rank.running else None
            error.add_note(f"autopar: rank {number} (stage {number})" + (f", in action {action}" if action else ""))
            raise
        if name in REPLICATED:
            return {number: result}
        results: list[Any] = [None] * self.rank.spec.world
        dist.all_gather_object(results, result, group=self.control)
        return dict(enumerate(results))

    def close(self) -> None:
        self.failed = "close() was called."
        if self.joined and dist.is_initialized():
            dist.destroy_process_group()
