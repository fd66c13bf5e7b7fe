"""Weights of a rank: bytes with gradient and optimizer state, and seconds once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from autopar.ir.cost_graph import BUCKET_BYTES, ResidentTensor
from autopar.ir.grad_buckets import group_weights, num_collectives
from autopar.ir.graph import DTYPE_BYTES, Graph, Weight
from autopar.ir.hardware import Hardware
from autopar.ir.layout import REPLICATED, TP, AxisSizes, Layout
from autopar.ir.network import CollectiveKind
from autopar.ir.plan_parts import ONE_REPLICA, ReduceDtype, Replicas
from autopar.ir.tensor_axes import TensorAxes, TensorAxis
from autopar.ops.regions import parameter_blocks


@dataclass(frozen=True)
class Sharing:
    """Sharing of a stage's weights among its ranks.

    Args:
        tp: ranks that each hold a shard or a copy of a weight.
        replicas: at ZeRO stage 1 each keeps the optimizer state of a part of the parameters only, from 2 on also their
            gradients only, and at 3 the parameters, except for blocks that are kept.
        blocks: under ZeRO-3, the block of each weight, by name.
        kept: blocks whose gathered parameters stay allocated.
        reduce_dtype: dtype in which gradients travel between replicas.
        storage: layout on the ``tp`` ranks of each weight that is not replicated, by name.
        axes: tensor axes of the ``tp`` ranks; by default one.
    """

    tp: int = 1
    replicas: Replicas = ONE_REPLICA
    storage: Mapping[str, Layout] = field(default_factory=dict)
    reduce_dtype: ReduceDtype = "float32"
    blocks: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    axes: TensorAxes = ()

    @property
    def tensor_axes(self) -> TensorAxes:
        return self.axes or (TensorAxis(TP, self.tp),)

    @property
    def axis_sizes(self) -> AxisSizes:
        """Sizes of the tensor axes by name."""
        return {axis.name: axis.ranks for axis in self.tensor_axes}

    def gathers(self, weight: Weight) -> bool:
        """Whether replicas gather a trained weight before each use."""
        return self.replicas.zero == 3 and self.blocks[weight.name] not in self.kept


def with_blocks(sharing: Sharing, graph: Graph) -> Sharing:
    """The sharing with the blocks of a graph's weights, as far as that matters."""
    if sharing.replicas.zero < 3:
        return sharing
    return replace(sharing, blocks=parameter_blocks(graph.ops, graph.weight))


UNSHARDED = Sharing()
# On a GPU, of all kernels of an update that take lists of tensors (norms, AdamW, casts): 0.3 to 1.0 us a parameter more
# than their bytes in the steps of 12 models of 150 to 476 parameters on H100 and H200, 0.6 or more in nine.
SECONDS_OF_A_PARAMETER = 0.8e-6


def is_trained(weight: Weight) -> bool:
    """Whether a weight has a gradient and optimizer state."""
    return weight.kind == "parameter" and weight.requires_grad


@dataclass(frozen=True)
class Bucket:
    """A gradient bucket.

    Args:
        num_collectives: under ZeRO, that reduce it, and that gather its weights.
    """

    num_bytes: int = BUCKET_BYTES
    num_collectives: int = 1


def gradient_buckets(weights: Sequence[Weight], sharing: Sharing, hardware: Hardware) -> Mapping[str, Bucket]:
    """The gradient bucket of each weight that replicas reduce, by the weight's name.

    Error: buckets of all weights together; a stage's own begin and end elsewhere. GPUs of one node that may reach each
        other's memory but are told not to (``transport="nccl"``) are priced as if they did.
    """
    if sharing.replicas.dp == 1:
        return {}
    owners = sharing.replicas.sharing
    are_peers = hardware.peer_access and (owners - 1) * sharing.tp < hardware.devices_per_node
    buckets: dict[str, Bucket] = {}
    for group in group_weights([w for w in weights if is_trained(w)], owners):
        # Kernels that write peers' memory move segments of different lengths together.
        collectives = 1 if are_peers else num_collectives(group, owners)
        bucket = Bucket(sum(w.stored_bytes for w in group), collectives)
        buckets |= {w.name: bucket for w in group}
    return buckets


def weight_cost(
    weight: Weight,
    groups: tuple[int, ...],
    sharing: Sharing,
    hardware: Hardware,
    fused_wgrad: bool = False,
    bucket: Bucket = Bucket(),
) -> ResidentTensor:
    """Cost of a weight on one rank: value, main gradient and optimizer state, and what a step spends on them.

    With low-precision parameters these are the FP32 master's, and the compute copy is added. Under ZeRO replicas divide
    masters, averages and state, from stage 2 on the main gradient, and at stage 3 what programs read. The copy's
    gradient is freed after it is added to the main gradient.

    Args:
        weight: this rank's shard of it.
        groups: numbers of the groups that read it.
        fused_wgrad: whether the wgrad GEMM accumulates into the main gradient, so that there is no temporary gradient.
        bucket: the weight's gradient bucket.
    """
    layout = sharing.storage.get(weight.name, REPLICATED)
    parts = prod(sharing.axis_sizes[split.axis] for split in layout.splits)
    trained, stored = is_trained(weight), weight.stored_bytes
    is_reduced = trained and sharing.replicas.dp > 1
    exchange = replica_exchange(weight, sharing, hardware, bucket) if is_reduced else ReplicaExchange()
    return ResidentTensor(
        name=weight.name,
        num_bytes=weight_bytes(weight, sharing)
        if trained
        else weight.copy_bytes + stored + ceil(weight.average_bytes * weight.numel),
        groups=groups,
        numel=weight.numel * parts if weight.kind == "parameter" else 0,
        optimizer_seconds=optimizer_seconds(weight, layout, sharing, hardware) if trained else 0.0,
        reduce_seconds=exchange.reduce_seconds,
        gather_seconds=exchange.gather_seconds,
        num_buckets=exchange.num_buckets,
        contention_seconds=exchange.contention_seconds,
        gradient_bytes=stored if trained else 0,
        wgrad_bytes=(weight.copy_bytes or stored) if trained and not fused_wgrad else 0,
        copy_bytes=weight.copy_bytes,
        flattened_grad_bytes=stored if trained and layout.partial_gradient else 0,
        block=sharing.blocks[weight.name] if trained and sharing.replicas.zero == 3 else "",
        is_gathered=trained and sharing.gathers(weight),
    )


def sharded_weight_cost(
    weight: Weight, groups: tuple[int, ...], sharing: Sharing, hardware: Hardware
) -> ResidentTensor:
    """As `weight_cost`, but for an unsharded weight, of which the rank keeps the shard in ``sharing.storage``."""
    shape = sharing.storage.get(weight.name, REPLICATED).local_shape(weight.shape, sharing.axis_sizes)
    return weight_cost(replace(weight, shape=shape), groups, sharing, hardware)


def weight_bytes(weight: Weight, sharing: Sharing = UNSHARDED) -> int:
    """Bytes of a trained weight on one rank: value, compute copy, main gradient, state of the optimizer and average.

    ZeRO divides state and average, and the master of a compute copy. Stage 2 divides the gradient too, and stage 3 what
    programs read.
    """
    owned, everywhere = (weight.state_bytes + weight.average_bytes) * weight.numel, 0.0
    if weight.copy_bytes:
        owned += weight.stored_bytes
    parts = {"gradient": weight.stored_bytes, "read": weight.num_bytes}
    divided = {"gradient": sharing.replicas.zero >= 2, "read": sharing.gathers(weight)}
    owned += sum(size for part, size in parts.items() if divided[part])
    everywhere += sum(size for part, size in parts.items() if not divided[part])
    return ceil(everywhere) + ceil(owned / sharing.replicas.sharing)


def update_seconds(weight: Weight, hardware: Hardware) -> float:
    """Seconds of one optimizer step on a weight.

    The norm of all gradients reads the gradient; then value, gradient and state are each read and written once.
    """
    update = hardware.update_seconds(2 * (2 * weight.stored_bytes + weight.state_bytes * weight.numel))
    lists = SECONDS_OF_A_PARAMETER if hardware.device_type == "cuda" else 0.0
    return hardware.traffic_seconds(weight.stored_bytes) + update + lists


def optimizer_seconds(weight: Weight, layout: Layout, sharing: Sharing, hardware: Hardware) -> float:
    """Seconds that a weight takes between the last backward and the next forward.

    They are its update, the casts to its compute copy and of a gradient that travels in another dtype, and the
    all-reduce of a gradient that is partial over the tensor parallel ranks. Under ZeRO only the owner updates and
    casts. From stage 2 on it also moves the reduced gradient out of the buffer in which it came.
    """
    stored, replicas = weight.stored_bytes, sharing.replicas
    seconds = update_seconds(weight, hardware) / replicas.sharing
    if weight.copy_bytes:
        seconds += hardware.traffic_seconds(stored + weight.copy_bytes) / replicas.sharing
    if (sent := reduce_bytes(weight, sharing)) < stored and replicas.dp > 1:
        seconds += hardware.traffic_seconds(stored + sent) * (1 + 1 / replicas.sharing)
    elif replicas.zero >= 2:
        seconds += hardware.traffic_seconds(2 * stored) / replicas.sharing
    summed = [axis for axis in sharing.tensor_axes if axis.name in layout.partial_gradient]
    return seconds + sum(bucket_share_seconds("all-reduce", stored, hardware, axis) for axis in summed)


@dataclass(frozen=True)
class ReplicaExchange:
    """A weight's share of the collectives between replicas, once a step; fields as in `ResidentTensor`."""

    reduce_seconds: float = 0.0
    gather_seconds: float = 0.0
    num_buckets: float = 0.0
    contention_seconds: float = 0.0


def replica_exchange(weight: Weight, sharing: Sharing, hardware: Hardware, bucket: Bucket) -> ReplicaExchange:
    """An all-reduce of the gradient; under ZeRO a reduce-scatter of the gradient, and an all-gather of the updated
    weight (of its compute copy, if there is one) during the next forward. At stage 3 every microbatch reduces, and
    gathers what is not kept: see `autopar.cost.groups.param_gathers`.

    Args:
        bucket: moves as a whole, or in several collectives one after another.
    """
    replicas, stride, share = sharing.replicas, sharing.tp, weight.stored_bytes / bucket.num_bytes
    reduced = bucket.num_bytes * reduce_bytes(weight, sharing) / weight.stored_bytes
    gathered, collectives, contention = 0.0, 1, hardware.replica_contention
    moved, reduce, gather = 2 * reduced, 0.0, 0.0
    if replicas.zero:
        ranks, further = replicas.sharing, bucket.num_collectives - 1
        gathered = 0.0 if sharing.gathers(weight) else bucket.num_bytes * weight.num_bytes / weight.stored_bytes
        collectives, moved = 2, reduced + gathered
        if replicas.zero < 3:
            reduce = hardware.collective_seconds("reduce-scatter", reduced, ranks, stride)
            reduce += further * hardware.group_link("reduce-scatter", ranks, stride).latency_seconds
        else:
            collectives, moved = 1, gathered
        if gathered:
            gather = hardware.collective_seconds("all-gather", gathered, ranks, stride)
            gather += further * hardware.group_link("all-gather", ranks, stride).latency_seconds
        if (copies := replicas.copies) > 1:
            reduce += hardware.collective_seconds("all-reduce", reduced / ranks, copies, stride * ranks)
            moved += 2 * reduced / ranks
    else:
        reduce = hardware.collective_seconds("all-reduce", reduced, replicas.dp, stride)
    contended = (collectives * contention.latency_seconds if moved else 0.0) + moved / contention.bytes_per_second
    return ReplicaExchange(share * reduce, share * gather, share, share * contended)


def reduce_bytes(weight: Weight, sharing: Sharing) -> int:
    """Bytes of a weight's gradient as it travels between replicas."""
    if sharing.reduce_dtype == "float32":
        return weight.stored_bytes
    return min(weight.stored_bytes, DTYPE_BYTES[sharing.reduce_dtype] * weight.numel)


def bucket_share_seconds(kind: CollectiveKind, num_bytes: float, hardware: Hardware, axis: TensorAxis) -> float:
    """A tensor's share of the seconds of full buckets: the latency counts in proportion to its bytes."""
    return hardware.collective_seconds(kind, BUCKET_BYTES, axis.ranks, axis.stride) * num_bytes / BUCKET_BYTES
