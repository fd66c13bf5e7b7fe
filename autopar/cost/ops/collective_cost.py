"""Seconds of the conversions between layouts, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.graph import Op
from autopar.ir.hardware import Hardware
from autopar.ir.strategies import ReshardingCost
from autopar.sharding.reshard import ReshardStep


def is_collective(op: Op) -> bool:
    """Whether sharding has put an operation into the graph."""
    return bool(op.home)


def total(parts: Iterable[ReshardingCost]) -> ReshardingCost:
    """The sum of conversions."""
    listed = list(parts)
    return ReshardingCost(sum(c.forward_seconds for c in listed), sum(c.backward_seconds for c in listed))


def step_seconds(step: ReshardStep, num_bytes: float, trained: bool, hardware: Hardware, ranks: int) -> ReshardingCost:
    """Time of one step: what it communicates between neighbours, or the copy that it makes.

    What a collective copies before and after communicating is not counted.

    Args:
        num_bytes: of the whole tensor.
        trained: whether a gradient comes back.
    """
    forward = hardware.collective_seconds(step.forward, num_bytes, ranks) if step.forward else 0.0
    if step.name in ("shard", "first_rank"):
        written = num_bytes / ranks if step.name == "shard" else num_bytes
        forward = hardware.op_seconds("memory", 0.0, 2 * written, "")
    backward = 0.0
    if trained and step.backward:
        backward = hardware.collective_seconds(step.backward, num_bytes, ranks)
    elif trained and step.name == "share_gradient":
        backward = hardware.op_seconds("memory", 0.0, 2 * num_bytes, "")
    return ReshardingCost(forward, backward)


def whole_bytes(step: ReshardStep, source_bytes: float, made_bytes: float, ranks: int) -> float:
    """Size of the whole tensor that a step takes a rank's part of, or leaves a rank's part of, or both."""
    return source_bytes * ranks if step.name == "all_to_all" else max(source_bytes, made_bytes)
