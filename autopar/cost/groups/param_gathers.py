"""Gathers of sharded parameters (ZeRO-3), and reductions of gradients: the part that compute does not hide.

Blocks are gathered one ahead of compute. So a block's gather hides under the pass through the block before it, and in a
backward so does the reduction of its gradients. What is longer, and the slowdown of compute by copies, is part of the
time of every microbatch. The first gather and the last reduction of a step hide under nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from autopar.cost.groups.weight_memory import Sharing, reduce_bytes
from autopar.ir.cost_graph import BUCKET_BYTES, CostGraph, Group, ResidentTensor
from autopar.ir.graph import Graph
from autopar.ir.hardware import Hardware
from autopar.ir.network import CollectiveKind
from autopar.ops.regions import op_blocks


def with_gathers(cost: CostGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> CostGraph:
    """The cost graph with what each microbatch waits for the replicas, block by block.

    Args:
        graph: the graph that was priced.

    Error: a block's gather is compared with the pass through the block itself, which is about as long as the one
        before it. Recomputation hides more in backwards than is counted here.
    """
    blocks: defaultdict[str, list[ResidentTensor]] = defaultdict(list)
    for tensor in cost.weights:
        if tensor.block:
            blocks[tensor.block].append(tensor)
    home = op_blocks(graph.ops)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(cost.groups):
        if group.ops:
            members[home[group.ops[0]]].append(number)
    groups, exposed = list(cost.groups), dict[str, ResidentTensor]()
    for block, tensors in blocks.items():
        weights = [graph.weight[tensor.name] for tensor in tensors]
        numbers = members.get(block) or [min(tensors[0].groups)]
        gathered = 0 if block in sharing.kept else sum(weight.num_bytes for weight in weights)
        gather = exchange("all-gather", gathered, sharing, hardware)
        reduce = exchange("reduce-scatter", sum(reduce_bytes(w, sharing) for w in weights), sharing, hardware)
        stored = sum(weight.stored_bytes for weight in weights)
        for tensor, weight in zip(tensors, weights, strict=True):
            part = weight.stored_bytes / stored
            exposed[tensor.name] = replace(
                tensor,
                reduce_seconds=tensor.reduce_seconds + part * reduce.seconds,
                gather_seconds=tensor.gather_seconds + part * gather.seconds,
                num_buckets=part * reduce.num_buckets,
            )
        forward = max(0.0, gather.seconds - sum(cost.groups[n].forward_seconds for n in numbers))
        backward = max(0.0, gather.seconds + reduce.seconds - sum(cost.groups[n].backward_seconds for n in numbers))
        forward += gather.contention_seconds
        backward += gather.contention_seconds + reduce.contention_seconds
        total = sum(cost.groups[n].seconds for n in numbers)
        for n in numbers:
            share = cost.groups[n].seconds / total if total else 1 / len(numbers)
            groups[n] = waiting(groups[n], share * forward, share * backward)
    return replace(cost, groups=tuple(groups), weights=tuple(exposed.get(w.name, w) for w in cost.weights))


@dataclass(frozen=True)
class Exchange:
    """Seconds of a block's collective, and by which it slows compute down although it is hidden; share of a bucket."""

    seconds: float = 0.0
    contention_seconds: float = 0.0
    num_buckets: float = 0.0


def exchange(kind: CollectiveKind, num_bytes: float, sharing: Sharing, hardware: Hardware) -> Exchange:
    """Collective of a block's bytes between replicas; small blocks share the latency of a bucket."""
    if not num_bytes:
        return Exchange()
    bucket_bytes = max(num_bytes, BUCKET_BYTES)
    share, contention = num_bytes / bucket_bytes, hardware.replica_contention
    return Exchange(
        share * hardware.collective_seconds(kind, bucket_bytes, sharing.replicas.sharing, sharing.tp),
        share * contention.latency_seconds + num_bytes / contention.bytes_per_second,
        share,
    )


def waiting(group: Group, forward_seconds: float, backward_seconds: float) -> Group:
    """The group with more seconds that it waits for replicas."""
    return replace(
        group,
        forward_seconds=group.forward_seconds + forward_seconds,
        backward_seconds=group.backward_seconds + backward_seconds,
        forward_exchange_seconds=group.forward_exchange_seconds + forward_seconds,
        backward_exchange_seconds=group.backward_exchange_seconds + backward_seconds,
    )
