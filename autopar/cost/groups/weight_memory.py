"""Weights of a rank: bytes with gradient and optimizer state, and seconds once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from autopar.ir.cost_graph import BUCKET_BYTES, ResidentTensor
from autopar.ir.graph import DTYPE_BYTES, Weight
from autopar.ir.hardware import CollectiveKind, Hardware
from autopar.ir.layout import REPLICATED, TP, Layout
from autopar.ir.plan_parts import ReduceDtype, ZeroStage


@dataclass(frozen=True)
class Sharing:
    """Sharing of a stage's weights among its ranks.

    Args:
        tp: ranks that each hold a shard or a copy of a weight.
        dp: replicas.
        zero: from 1 on, each of the ``dp`` replicas keeps the optimizer state of a part of the parameters only; at 2
            also their gradients only.
        reduce_dtype: dtype in which gradients travel between replicas.
        storage: layout on the ``tp`` ranks of each weight that is not replicated, by name.
    """

    tp: int = 1
    dp: int = 1
    zero: ZeroStage = 0
    storage: Mapping[str, Layout] = field(default_factory=dict)
    reduce_dtype: ReduceDtype = "float32"


UNSHARDED = Sharing()


def weight_cost(
    weight: Weight, groups: tuple[int, ...], sharing: Sharing, hardware: Hardware, fused_wgrad: bool = False
) -> ResidentTensor:
    """Cost of a weight on one rank: value, main gradient and optimizer state, and what a step spends on them.

    With low-precision parameters these are the FP32 master's, and the compute copy is added. Under ZeRO only the owner
    keeps master and state, and at stage 2 the main gradient. The copy's gradient is freed after it is added to that.

    Args:
        weight: this rank's shard of it.
        groups: numbers of the groups that read it.
        fused_wgrad: whether the wgrad GEMM accumulates into the main gradient, so that there is no temporary gradient.
    """
    layout = sharing.storage.get(weight.name, REPLICATED)
    parts = sharing.tp if any(s.axis == TP for s in layout.splits) else 1
    trained = weight.kind == "parameter" and weight.requires_grad
    stored = weight.stored_bytes
    traffic = replica_traffic_bytes(weight, sharing) if trained and sharing.dp > 1 else 0
    return ResidentTensor(
        name=weight.name,
        num_bytes=(weight_bytes(weight, sharing) if trained else weight.copy_bytes + stored)
        + ceil(weight.average_bytes * weight.numel),
        groups=groups,
        numel=weight.numel * parts if weight.kind == "parameter" else 0,
        optimizer_seconds=optimizer_seconds(weight, layout, sharing, hardware) if trained else 0.0,
        reduce_seconds=reduce_seconds(weight, sharing, hardware) if trained else 0.0,
        contention_seconds=traffic / hardware.replica_bytes_per_second,
        gradient_bytes=stored if trained else 0,
        wgrad_bytes=(weight.copy_bytes or stored) if trained and not fused_wgrad else 0,
        copy_bytes=weight.copy_bytes,
        flattened_grad_bytes=stored if trained and TP in layout.partial_gradient else 0,
    )


def sharded_weight_cost(
    weight: Weight, groups: tuple[int, ...], sharing: Sharing, hardware: Hardware
) -> ResidentTensor:
    """As `weight_cost`, but for an unsharded weight, of which the rank keeps the shard in ``sharing.storage``."""
    shape = sharing.storage.get(weight.name, REPLICATED).local_shape(weight.shape, {TP: sharing.tp})
    return weight_cost(replace(weight, shape=shape), groups, sharing, hardware)


def state_ranks(sharing: Sharing) -> int:
    """Number of ranks that divide the optimizer state of one weight."""
    return sharing.dp if sharing.zero else 1


def weight_bytes(weight: Weight, sharing: Sharing = UNSHARDED) -> int:
    """Bytes of a trained weight on one rank: value, compute copy, main gradient, and its part of the optimizer state.

    With a compute copy, ZeRO divides the master value like the optimizer state, unless averaged weights (EMA) read the
    master. Stage 2 divides the gradient too.
    """
    owned, everywhere = weight.state_bytes * weight.numel, weight.num_bytes
    if sharing.zero == 2:
        owned += weight.stored_bytes
    else:
        everywhere += weight.stored_bytes
    if weight.copy_bytes and weight.average_bytes:
        everywhere += weight.stored_bytes
    elif weight.copy_bytes:
        owned += weight.stored_bytes
    return everywhere + ceil(owned / state_ranks(sharing))


def update_seconds(weight: Weight, hardware: Hardware) -> float:
    """Seconds of one optimizer step on a weight: value, gradient and state are each read and written once."""
    return hardware.update_seconds(2 * (2 * weight.stored_bytes + weight.state_bytes * weight.numel))


def optimizer_seconds(weight: Weight, layout: Layout, sharing: Sharing, hardware: Hardware) -> float:
    """Seconds that a weight takes between the last backward and the next forward.

    They are its update, the casts to its compute copy and of a gradient that travels in another dtype, and the
    all-reduce of a gradient that is partial over the tensor parallel ranks. Under ZeRO only the owner updates and
    casts. At stage 2 it also moves the reduced gradient out of the buffer in which it came.
    """
    stored = weight.stored_bytes
    seconds = update_seconds(weight, hardware) / state_ranks(sharing)
    if weight.copy_bytes:
        seconds += hardware.traffic_seconds(stored + weight.copy_bytes) / state_ranks(sharing)
    if (wire := wire_bytes(weight, sharing)) < stored and sharing.dp > 1:
        seconds += hardware.traffic_seconds(stored + wire) * (1 + 1 / state_ranks(sharing))
    elif sharing.zero == 2:
        seconds += hardware.traffic_seconds(2 * stored) / state_ranks(sharing)
    if TP in layout.partial_gradient:
        seconds += bucket_share_seconds("all-reduce", stored, hardware, sharing.tp)
    return seconds


def reduce_seconds(weight: Weight, sharing: Sharing, hardware: Hardware) -> float:
    """Seconds to all-reduce a gradient over the replicas.

    Under ZeRO a reduce-scatter of the gradient, and an all-gather of the updated weight (of its compute copy, if
    there is one) during the next forward.
    """
    ranks, stride, wire = sharing.dp, sharing.tp, wire_bytes(weight, sharing)
    bucket = BUCKET_BYTES * wire / (weight.stored_bytes or 1)  # as it travels
    if not sharing.zero:
        return bucket_share_seconds("all-reduce", wire, hardware, ranks, stride, bucket)
    scatter = bucket_share_seconds("reduce-scatter", wire, hardware, ranks, stride, bucket)
    return scatter + bucket_share_seconds("all-gather", weight.num_bytes, hardware, ranks, stride)


def wire_bytes(weight: Weight, sharing: Sharing) -> int:
    """Bytes of a weight's gradient as it travels between replicas."""
    if sharing.reduce_dtype == "float32":
        return weight.stored_bytes
    return min(weight.stored_bytes, DTYPE_BYTES[sharing.reduce_dtype] * weight.numel)


def replica_traffic_bytes(weight: Weight, sharing: Sharing) -> int:
    """Bytes of a weight that collectives between replicas move: gradient and, under ZeRO, updated weight."""
    wire = wire_bytes(weight, sharing)
    return wire + (weight.num_bytes if sharing.zero else wire)


def bucket_share_seconds(
    kind: CollectiveKind,
    num_bytes: float,
    hardware: Hardware,
    ranks: int,
    stride: int = 1,
    bucket_bytes: float = BUCKET_BYTES,
) -> float:
    """A tensor's share of the seconds of full buckets: the latency counts in proportion to its bytes."""
    return hardware.collective_seconds(kind, bucket_bytes, ranks, stride) * num_bytes / bucket_bytes
