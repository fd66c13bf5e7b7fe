"""Collectives of a caller's own tensors and objects over the processes of a launcher, outside of a model's steps."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.runtime.launch.environment import Launched, launcher_store

# Names of operations; "mean" is a sum that is divided, since Gloo has none.
NAMES = {
    "sum": "sum", "mean": "mean", "avg": "mean", "max": "max", "min": "min",
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min",
}  # fmt: skip
OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def join_default_group(launch: Launched, device_type: str) -> None:
    """Join torch's default process group, unless the caller has; models then run in it."""
    if dist.is_initialized():
        return
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("caller", launcher_store(launch)),
        rank=launch.rank,
        world_size=launch.world,
    )
    if device_type == "cuda":  # NCCL warns of a group that the process leaves behind
        atexit.register(leave_default_group)


def leave_default_group() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_whole_group(group: Any) -> bool:
    """Whether a caller's ``group`` argument stands for all processes."""
    return group is None or group is dist.group.WORLD


def all_reduce(tensor: torch.Tensor, operation: Any, group: Any = None, counts: bool = True) -> torch.Tensor:
    """A tensor reduced over processes, in place.

    Args:
        operation: "sum", "mean", "max" or "min", or an operation of torch.distributed.
        counts: whether this process's tensor is added to a sum.

    Raises:
        UsageError: another operation.
    """
    name = NAMES.get(operation.lower() if isinstance(operation, str) else operation)
    if name is None:
        raise UsageError(f"Tensors of processes are not reduced by {operation!r}. Use sum, mean, max or min.")
    if name == "sum" and not counts:
        tensor.zero_()
    dist.all_reduce(tensor, OPERATIONS[name], group=group)
    if name == "mean":
        tensor.copy_(tensor / dist.get_world_size(group))
    return tensor


def all_gather(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Tensors of all processes, [processes, *shape], without a graph."""
    own = tensor.detach().contiguous()
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered)


def broadcast_object(thing: Any, source: int) -> Any:
    """An object that one process passes, on all of them."""
    things = [thing]
    dist.broadcast_object_list(things, source)
    return things[0]


def barrier() -> None:
    """Wait for all processes."""
    dist.barrier()
