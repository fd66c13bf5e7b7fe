"""The cost graph of a model: seconds and bytes of every group on one machine at one microbatch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.cost.groups.grouping import OpGroup, group_ops, group_sharded_ops
from autopar.cost.groups.param_gathers import with_gathers
from autopar.cost.groups.weight_memory import UNSHARDED, Bucket, Sharing, gradient_buckets, weight_cost, with_blocks
from autopar.cost.ops.op_cost import NO_FACTORS, UNMEASURED, Factors, OpCost, Pricing, op_costs, padded_bytes
from autopar.cost.ops.overlap import with_exposed_collectives
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph, refs
from autopar.ir.hardware import Hardware

LOSS = "loss"
CUDNN_WORKSPACE_FACTOR = 1.2  # workspace of a cuDNN convolution over the bytes of its input and output


def price(
    pricing: Pricing,
    sharing: Sharing = UNSHARDED,
    groups: tuple[Group, ...] | None = None,
    factors: Factors = NO_FACTORS,
) -> CostGraph:
    """The cost graph of a traced model, or of the local graph that each rank of a sharded model runs.

    FLOPs and activation bytes are proportional to the batch; weight bytes are not. A storage that is saved for the
    backward counts once, for the groups that save it, regardless of the group that makes it.

    Args:
        pricing: of the graph for the samples of a microbatch, of all ranks of a tensor-parallel group together.
        sharing: how the ranks of a stage share its weights.
        groups: groups of the unsharded graph, for a local graph; by default the operations are grouped here.
        factors: measured factors by operation. They do not change the groups.
    Raises:
        HardwareError: the machine has no peak for a dtype that the model computes in.
    Error: for seconds see `autopar.api.planning.error_band`. Saved bytes equal what torch 2.15 saves on CPU to 0.1 %
        for most timm families. Of the models compared, an LSTM (Sequencer) keeps 2.5 times as much. TResNet keeps 16 %
        less: its in-place activation is traced as one that is not in place. GPU kernels may add workspaces.
    """
    graph, hardware, costs = pricing.graph, pricing.hardware, op_costs(pricing)
    sharing = with_blocks(sharing, graph)
    if groups is None:
        seconds = {name: cost.forward_seconds + cost.backward_seconds for name, cost in costs.items()}
        members = group_ops(graph, seconds, {name: cost.flops for name, cost in costs.items()})
    else:
        members = group_sharded_ops(graph, [group for group in groups if group.ops])
    group_of = {op.name: i for i, m in enumerate(members) for op in m.ops}
    own_saved, shared_saved = saved_memory(pricing, group_of)
    costs = {name: cost.scaled_by(factors.get(name, UNMEASURED)) for name, cost in costs.items()}
    costs = with_exposed_collectives(pricing, costs)
    priced = [sum_group(m, [costs[op.name] for op in m.ops], own_saved[i]) for i, m in enumerate(members)]
    if hardware.device_type == "cuda":
        priced = [with_workspace(group, m, pricing) for group, m in zip(priced, members, strict=True)]
    sets = (tuple(sorted({group_of[name] for name in names})) for names in graph.colocated)
    cost = CostGraph(
        model=graph.model,
        batch=pricing.batch,
        groups=(*priced, Group(LOSS, (), "")),
        edges=tuple(tensor_edges(pricing, group_of, saving_groups(pricing, group_of), loss=len(priced))),
        weights=tuple(weight_costs(pricing, group_of, sharing)),
        saved=shared_saved,
        colocated=tuple(dict.fromkeys(numbers for numbers in sets if len(numbers) > 1)),
    )
    return with_gathers(cost, graph, sharing, hardware) if sharing.replicas.zero == 3 else cost


def with_weight_sharing(cost: CostGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> CostGraph:
    """The cost graph with the costs of its weights for other replicas, or under another ZeRO stage.

    Args:
        graph: the graph that was priced, for the weights' shapes.
        sharing: the new numbers of replicas and shards.
    """
    sharing = with_blocks(sharing, graph)
    buckets = gradient_buckets([graph.weight[w.name] for w in cost.weights], sharing, hardware)
    weights = tuple(
        weight_cost(graph.weight[w.name], w.groups, sharing, hardware, w.has_fused_wgrad, buckets.get(w.name, Bucket()))
        for w in cost.weights
    )
    shared = replace(cost, weights=weights)
    return with_gathers(shared, graph, sharing, hardware) if sharing.replicas.zero == 3 else shared


# -- groups --------------------------------------------------------------------------------------------------------


def sum_group(members: OpGroup, costs: list[OpCost], saved_bytes: int) -> Group:
    """A group with the summed costs of its operations. Transient bytes are a maximum: operations run one by one."""
    return Group(
        name=members.anchor.name,
        ops=tuple(op.name for op in members.ops),
        module=members.anchor.module,
        forward_seconds=sum(c.forward_seconds for c in costs),
        backward_seconds=sum(c.backward_seconds for c in costs),
        flops=sum(c.flops for c in costs),
        saved_bytes=saved_bytes,
        transient_bytes=max(c.transient_bytes for c in costs),
        forward_collective_seconds=sum(c.collectives.forward_seconds for c in costs),
        backward_collective_seconds=sum(c.collectives.backward_seconds for c in costs),
        symmetric_buffer_bytes=max(c.symmetric_buffer_bytes for c in costs),
        wgrad_seconds=sum(c.wgrad_seconds for c in costs),
        deferred_bytes=sum(c.deferred_bytes for c in costs),
    )


def with_workspace(group: Group, members: OpGroup, pricing: Pricing) -> Group:
    """The group with the workspace that cuDNN allocates when it tries algorithms in the first steps on a GPU.

    Error: fitted to peaks of ResNet-50, ResNet-101 and ResNeXt-50 in bf16 on H100 and H200, of 64 and 256 images. They
        were 0.7 to 1.3 times the input and output bytes of the largest convolution above the other terms, and 0.1 times
        for EfficientNet-B3.
    """
    most = 0.0
    for op in members.ops:
        if "conv" in op.target:
            names = (*(n for n in op.reads if n not in pricing.graph.weight), op.outputs[0].name)
            most = max(most, sum(map(padded_bytes(op, pricing, pricing.num_bytes), names)))
    return replace(group, workspace_bytes=round(CUDNN_WORKSPACE_FACTOR * most))


# -- edges, weights and saved activations ----------------------------------------------------------------------------


def reading_groups(graph: Graph, group_of: Mapping[str, int], loss: int) -> Mapping[str, set[int]]:
    """Numbers of the groups that read each value or weight; the loss reads the model's outputs."""
    reading: defaultdict[str, set[int]] = defaultdict(set)
    for op in graph.ops:
        for name in (*op.reads, *op.mutates):
            reading[name].add(group_of[op.name])
    for name in refs(graph.outputs):
        reading[name].add(loss)
    return reading


def tensor_edges(
    pricing: Pricing, group_of: Mapping[str, int], saving: Mapping[str, set[int]], loss: int
) -> Iterable[TensorEdge]:
    """An edge for each value that crosses groups. Graph inputs have none: every stage receives those that it needs."""
    reading, seen = reading_groups(pricing.graph, group_of, loss), set[str]()
    for op in pricing.graph.ops:
        source = group_of[op.name]
        for value, made in zip(op.outputs, pricing.stats.ops[op.name].outputs, strict=True):
            consumers = tuple(sorted(reading[value.name] - {source}))
            if consumers:
                storage, num_bytes = pricing.storage.get(value.name, value.name), pricing.num_bytes(value.name)
                saved_by: tuple[int, ...] = ()
                if storage in saving and storage not in seen and num_bytes == pricing.num_bytes(storage):
                    saved_by = tuple(sorted(g for g in saving[storage] if g >= source))
                seen.add(storage)
                yield TensorEdge(value.name, source, consumers, num_bytes, made.requires_grad, saved_by)


def weight_costs(pricing: Pricing, group_of: Mapping[str, int], sharing: Sharing) -> Iterable[ResidentTensor]:
    """Cost of each weight with its gradient and optimizer state. Weights that no operation reads are left out."""
    reading = reading_groups(pricing.graph, group_of, loss=-1)
    read_by = {w.name: tuple(sorted(reading[w.name] - {-1})) for w in pricing.graph.weights}
    weights = [weight for weight in pricing.graph.weights if read_by[weight.name]]
    buckets = gradient_buckets(weights, sharing, pricing.hardware)
    for weight in weights:
        fused, bucket = weight.name in pricing.fused_wgrad_weights, buckets.get(weight.name, Bucket())
        yield weight_cost(weight, read_by[weight.name], sharing, pricing.hardware, fused, bucket)


def saved_memory(pricing: Pricing, group_of: Mapping[str, int]) -> tuple[Mapping[int, int], tuple[ResidentTensor, ...]]:
    """Bytes that a single group saves, by group number; and the storages that several groups save."""
    by_group: defaultdict[int, int] = defaultdict(int)
    for op in pricing.graph.ops:
        by_group[group_of[op.name]] += round(pricing.scaled(pricing.stats.ops[op.name].saved_bytes, op.name))
    saving = saving_groups(pricing, group_of)
    for storage, groups in saving.items():
        if len(groups) == 1:
            by_group[min(groups)] += pricing.num_bytes(storage)
    shared = (
        ResidentTensor(storage, pricing.num_bytes(storage), tuple(sorted(groups)))
        for storage, groups in saving.items()
        if len(groups) > 1
    )
    return by_group, tuple(shared)


def saving_groups(pricing: Pricing, group_of: Mapping[str, int]) -> Mapping[str, set[int]]:
    """Numbers of the groups that save each activation storage for their backward."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for op in pricing.graph.ops:
        for name in pricing.stats.ops[op.name].saved_names(op):
            storage = pricing.storage.get(name, name)
            if storage not in pricing.graph.weight:
                found[storage].add(group_of[op.name])
    return found
