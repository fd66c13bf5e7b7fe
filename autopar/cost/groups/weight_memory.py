"""What the weights of a rank take: bytes, and seconds once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from autopar.ir.cost_graph import BUCKET_BYTES, ResidentTensor
from autopar.ir.graph import Weight
from autopar.ir.hardware import CollectiveKind, Hardware
from autopar.ir.layout import REPLICATED, TP, Layout


@dataclass(frozen=True)
class Sharing:
    """How the ranks of one stage share its weights.

    Args:
        storage: the layout in which each weight that is not plainly replicated is held on the ``tp`` ranks.
        zero1: each of the ``dp`` replicas keeps the optimizer's state of a part of the parameters.
    """

    tp: int = 1
    dp: int = 1
    zero1: bool = False
    storage: Mapping[str, Layout] = field(default_factory=dict)


UNSHARDED = Sharing()


def weight_cost(
    weight: Weight, groups: tuple[int, ...], sharing: Sharing, hardware: Hardware, fused_wgrad: bool = False
) -> ResidentTensor:
    """A weight with gradient and optimizer state, of which the replicas keep a part each under ZeRO-1.

    In mixed precision these are the master's, which under ZeRO-1 its owner alone has, and the copy that programs read
    comes on top. The gradient of a copy is gone as soon as it is added to the master's.

    Args:
        weight: a rank's part of it.
        adds: whether its operation adds to the gradient, of which a backward leaves nothing elsewhere then.
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
    """The same for a whole weight of which a rank has the part that its layout says."""
    shape = sharing.storage.get(weight.name, REPLICATED).local_shape(weight.shape, {TP: sharing.tp})
    return weight_cost(replace(weight, shape=shape), groups, sharing, hardware)


def state_ranks(sharing: Sharing) -> int:
    """How many ranks divide the optimizer's state of one weight among them."""
    return sharing.dp if sharing.zero1 else 1


def weight_bytes(weight: Weight, sharing: Sharing = UNSHARDED) -> int:
    """Bytes of a trained weight: value, copy, gradient and a rank's part of the optimizer's state, in mixed precision
    with a part of the value, or all of it where averages read that."""
    owned, everywhere = weight.state_bytes * weight.numel, weight.stored_bytes + weight.num_bytes
    if weight.copy_bytes and weight.average_bytes:
        everywhere += weight.stored_bytes
    elif weight.copy_bytes:
        owned += weight.stored_bytes
    return everywhere + ceil(owned / state_ranks(sharing))


def update_seconds(weight: Weight, hardware: Hardware) -> float:
    """Time of one optimizer step on a weight: value, gradient and state are each read and written once."""
    return hardware.update_seconds(2 * (2 * weight.stored_bytes + weight.state_bytes * weight.numel))


def optimizer_seconds(weight: Weight, layout: Layout, sharing: Sharing, hardware: Hardware) -> float:
    """What a weight costs between the last backward and the next forward: its update, casting it to the copy that
    programs read (its owner's work under ZeRO-1), and the sum of its gradient over the shards where each has a
    summand."""
    stored = weight.stored_bytes
    seconds = update_seconds(weight, hardware) / state_ranks(sharing)
    if weight.copy_bytes:
        seconds += hardware.traffic_seconds(stored + weight.copy_bytes) / state_ranks(sharing)
    if TP in layout.partial_gradient:
        seconds += bucket_share_seconds("all-reduce", stored, hardware, sharing.tp)
    return seconds


def reduce_seconds(weight: Weight, sharing: Sharing, hardware: Hardware) -> float:
    """Time to sum a gradient over the replicas. Under ZeRO-1 each only needs the sum of its part, and what programs
    read of the weight, its copy where there is one, is gathered from the owners under the next forward.
    """
    ranks, stride = sharing.dp, sharing.tp
    if not sharing.zero1:
        return bucket_share_seconds("all-reduce", weight.stored_bytes, hardware, ranks, stride)
    scatter = bucket_share_seconds("reduce-scatter", weight.stored_bytes, hardware, ranks, stride)
    return scatter + bucket_share_seconds("all-gather", weight.num_bytes, hardware, ranks, stride)


def replica_traffic_bytes(weight: Weight, sharing: Sharing) -> int:
    """What replicas sum of a weight and gather of it."""
    return weight.stored_bytes + (weight.num_bytes if sharing.zero1 else weight.stored_bytes)


def bucket_share_seconds(
    kind: CollectiveKind, num_bytes: float, hardware: Hardware, ranks: int, stride: int = 1
) -> float:
    """A tensor's share of the time of full buckets: its bytes over the bandwidth, and of the latency its part."""
    return hardware.collective_seconds(kind, BUCKET_BYTES, ranks, stride) * num_bytes / BUCKET_BYTES
