"""From facts to a cost graph: seconds and bytes of every group on one machine at one microbatch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.cost.groups.grouping import OpGroup, group_ops, group_sharded_ops
from autopar.cost.groups.weight_memory import UNSHARDED, Sharing, weight_cost
from autopar.cost.ops.collective_cost import is_collective
from autopar.cost.ops.op_cost import NO_FACTORS, UNMEASURED, Factors, OpCost, Pricing, op_costs
from autopar.cost.ops.op_stats import GraphStats
from autopar.cost.ops.overlap import with_exposed_collectives
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph, refs
from autopar.ir.hardware import Hardware

LOSS = "loss"
CUDNN_WORKSPACE_FACTOR = 2  # of cuDNN's convolutions, as a multiple of what they read and make


def price(
    graph: Graph,
    stats: GraphStats,
    hardware: Hardware,
    batch: int,
    sharing: Sharing = UNSHARDED,
    groups: tuple[Group, ...] | None = None,
    factors: Factors = NO_FACTORS,
) -> CostGraph:
    """The cost graph of a traced model, or of what each rank runs of a sharded one, at one microbatch size.

    FLOPs and activation bytes are linear in the batch, weight bytes are not. A storage that is saved for the backward
    counts for the groups that save it, each storage once, whoever made it.

    Args:
        facts: of this graph, from `op_facts`.
        batch: samples per microbatch, of all ranks of a tensor-parallel group together.
        sharing: what the ranks that hold the same weights have divided among them.
        groups: of the whole graph, to be kept in the sharded one; found anew where none are given.
        factors: of operations that were measured. They do not change groups.
    Raises:
        HardwareError: the machine has no peak for a dtype the model computes in.
    Error: ``hardware.error`` for seconds. Saved bytes equal what torch 2.15 saves on CPU to 0.1 % for most timm
        families. Of those compared, an LSTM (Sequencer) keeps 2.5 times as much, and a model whose own in-place
        activation was traced into one that is not in place keeps less (TResNet, 16 %). GPU kernels may add workspaces.
    """
    pricing = Pricing(graph, stats, hardware, batch, sharing.tp)
    costs = op_costs(pricing)
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
    return CostGraph(
        model=graph.model,
        batch=batch,
        groups=(*priced, Group(LOSS, (), "")),
        edges=tuple(tensor_edges(pricing, group_of, saving_groups(pricing, group_of), loss=len(priced))),
        weights=tuple(weight_costs(pricing, group_of, sharing)),
        saved=shared_saved,
        colocated=tuple(dict.fromkeys(numbers for numbers in sets if len(numbers) > 1)),
    )


def with_weight_sharing(cost: CostGraph, graph: Graph, sharing: Sharing, hardware: Hardware) -> CostGraph:
    """The same graph as its replicas, and whether they share the optimizer's state, are in ``sharing``: only weights
    cost something else."""
    weights = tuple(
        weight_cost(graph.weight[w.name], w.groups, sharing, hardware, w.gradient_bytes > w.wgrad_bytes == 0)
        for w in cost.weights
    )
    return replace(cost, weights=weights)


# -- groups --------------------------------------------------------------------------------------------------------


def sum_group(members: OpGroup, costs: list[OpCost], saved_bytes: int) -> Group:
    """The sum of a group's operations; its working set is that of the largest, since they run one by one."""
    collectives = [cost for op, cost in zip(members.ops, costs, strict=True) if is_collective(op)]
    return Group(
        name=members.anchor.name,
        ops=tuple(op.name for op in members.ops),
        module=members.anchor.module,
        forward_seconds=sum(c.forward_seconds for c in costs),
        backward_seconds=sum(c.backward_seconds for c in costs),
        flops=sum(c.flops for c in costs),
        saved_bytes=saved_bytes,
        transient_bytes=max(c.transient_bytes for c in costs),
        forward_collective_seconds=sum(c.forward_seconds for c in collectives),
        backward_collective_seconds=sum(c.backward_seconds for c in collectives),
        symmetric_buffer_bytes=max((c.symmetric_buffer_bytes for c in collectives), default=0),
    )


def with_workspace(group: Group, members: OpGroup, pricing: Pricing) -> Group:
    """A group as GPUs run it: cuDNN tries its convolutions with workspaces in the first steps.

    Error: fitted to ResNet-50 alone, 256 images in bf16 on an H200 (`docs/benchmarks/h200-x2-resnet50-dp2.json`), which
        took 1.13 GiB beyond what is accounted for otherwise, 1.96 times what the largest of its convolutions reads and
        makes.
    """
    convolutions = [op for op in members.ops if "conv" in op.target]
    around = [(*(n for n in op.reads if n not in pricing.graph.weight), op.outputs[0].name) for op in convolutions]
    most = max((sum(map(pricing.num_bytes, names)) for names in around), default=0)
    return replace(group, workspace_bytes=CUDNN_WORKSPACE_FACTOR * most)


# -- what flows and what stays ---------------------------------------------------------------------------------------


def reading_groups(graph: Graph, group_of: Mapping[str, int], loss: int) -> Mapping[str, set[int]]:
    """Groups that read each value or weight; the loss reads the model's outputs."""
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
    """Values that another group reads than the one that makes them. Graph inputs are handed to whoever needs them."""
    reading, seen = reading_groups(pricing.graph, group_of, loss), set[str]()
    for op in pricing.graph.ops:
        here = group_of[op.name]
        for value, made in zip(op.outputs, pricing.stats.ops[op.name].outputs, strict=True):
            consumers = tuple(sorted(reading[value.name] - {here}))
            if consumers:
                storage, num_bytes = pricing.storage.get(value.name, value.name), pricing.num_bytes(value.name)
                kept_by: tuple[int, ...] = ()
                if storage in saving and storage not in seen and num_bytes == pricing.num_bytes(storage):
                    kept_by = tuple(sorted(g for g in saving[storage] if g >= here))
                seen.add(storage)
                yield TensorEdge(value.name, here, consumers, num_bytes, made.requires_grad, kept_by)


def weight_costs(pricing: Pricing, group_of: Mapping[str, int], sharing: Sharing) -> Iterable[ResidentTensor]:
    """Weights with gradient and optimizer state. One that no operation reads is held by no group and left out."""
    reading = reading_groups(pricing.graph, group_of, loss=-1)
    for weight in pricing.graph.weights:
        groups = tuple(sorted(reading[weight.name] - {-1}))
        if groups:
            yield weight_cost(weight, groups, sharing, pricing.hardware, weight.name in pricing.fused_wgrad_weights)


def saved_memory(pricing: Pricing, group_of: Mapping[str, int]) -> tuple[Mapping[int, int], tuple[ResidentTensor, ...]]:
    """Bytes that only one group saves, by group; and storages that several groups save."""
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
    """The groups that save each storage of an activation for their backward."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for op in pricing.graph.ops:
        facts = pricing.stats.ops[op.name]
        for name in facts.saved_names(op):
            storage = pricing.storage.get(name, name)
            if storage not in pricing.graph.weight:
                found[storage].add(group_of[op.name])
    return found
