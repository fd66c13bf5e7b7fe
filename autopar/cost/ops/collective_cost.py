"""Seconds of resharding steps: the collectives and copies that bring a tensor from one layout into another."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.graph import Op, Value
from autopar.ir.hardware import Hardware
from autopar.ir.strategies import ReshardingCost
from autopar.ir.tensor_axes import TensorAxis
from autopar.sharding.exchanges import border_strips, exchanges
from autopar.sharding.reshard import ReshardStep


def is_collective(op: Op) -> bool:
    """Whether sharding inserted an operation into the graph: a collective, or a local slice."""
    return bool(op.home)


def sum_costs(parts: Iterable[ReshardingCost]) -> ReshardingCost:
    """Sum of several resharding costs."""
    listed = list(parts)
    return ReshardingCost(sum(c.forward_seconds for c in listed), sum(c.backward_seconds for c in listed))


def reshard_step_cost(
    step: ReshardStep, num_bytes: float, trained: bool, hardware: Hardware, axis: TensorAxis
) -> ReshardingCost:
    """Seconds of one resharding step per microbatch: a collective, or the copy that a local step makes.

    Copies that a collective makes before and after it communicates are not counted.

    Args:
        num_bytes: size of the unsharded tensor, byte.
        trained: whether the tensor has a gradient, which takes the step backwards.
    """
    ranks, stride = axis.ranks, axis.stride
    forward = hardware.collective_seconds(step.forward, num_bytes, ranks, stride) if step.forward else 0.0
    if step.name in ("shard", "first_rank"):
        written = num_bytes / ranks if step.name == "shard" else num_bytes
        forward = hardware.op_seconds("memory", 0.0, 2 * written, "")
    backward = 0.0
    if trained and step.backward:
        backward = hardware.collective_seconds(step.backward, num_bytes, ranks, stride)
    elif trained and step.name == "share_gradient":
        backward = hardware.op_seconds("memory", 0.0, 2 * num_bytes, "")
    return ReshardingCost(forward, backward)


def exchange_cost(op: Op, part: Value, scale: float, hardware: Hardware, axis: TensorAxis) -> ReshardingCost:
    """Seconds of the collectives inside of an operation of a rank; arguments as of `exchanges`.

    Args:
        scale: batch that is priced over the batch of ``part``.
        axis: on which the operation is split.
    Error: the moments of a batch norm, a few KiB, are counted as if they grew with the batch.
    """
    seconds = [0.0, 0.0]
    for exchange in exchanges(op, part):
        num_bytes = scale * exchange.num_bytes
        seconds[exchange.is_backward] += hardware.collective_seconds(exchange.kind, num_bytes, axis.ranks, axis.stride)
    return ReshardingCost(seconds[False], seconds[True])


def window_copy_cost(op: Op, part: Value, scale: float, hardware: Hardware) -> ReshardingCost:
    """Seconds in which windows over a part's ends are computed apart: strips, and one tensor made of all results.

    Args:
        op, part, scale: as of `exchange_cost`.
    Error: a strip's kernels are counted as launches alone.
    """
    strips = border_strips(op, part)
    if not strips:
        return ReshardingCost(0.0, 0.0)
    copied = hardware.op_seconds("memory", 0.0, 2 * scale * op.outputs[0].num_bytes, "")
    backward = copied + 2 * len(strips) * hardware.launch_seconds if op.outputs[0].requires_grad else 0.0
    return ReshardingCost(copied + len(strips) * hardware.launch_seconds, backward)


def full_tensor_bytes(step: ReshardStep, source_bytes: float, made_bytes: float, ranks: int) -> float:
    """Bytes of the unsharded tensor that a resharding step works on; its input or its output may be one rank's part."""
    return source_bytes * ranks if step.name == "all_to_all" else max(source_bytes, made_bytes)
