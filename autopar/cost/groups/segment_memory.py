"""Activation checkpointing: bytes that groups keep and restore where segments recompute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.groups.recompute_segments import lifetimes
from autopar.cost.ops.op_cost import Pricing
from autopar.ir.activation import NO_SEGMENT, Activation, Keeper
from autopar.ir.cost_graph import CostGraph, Group, ResidentTensor, TensorEdge
from autopar.ir.graph import Graph


def with_segments(cost: CostGraph, pricing: Pricing, starts: Sequence[int]) -> CostGraph:
    """The cost graph with the segments of each group, and with activations for any segments that recompute.

    A segment that recomputes keeps the tensors that enter it. Such a tensor counts for the first operation that reads
    it outside the segment that makes it. ``segment_bytes`` are allocated while the group's backward runs: tensors saved
    by its segment's operations up to the group's last one, since later operations free theirs first.

    Args:
        pricing: that the cost graph was made by.
        starts: indices of the operations that begin segments.
    Error: a group with operations in several segments runs again where its anchor does.
    """
    graph = pricing.graph
    segment = [int(before) - 1 for before in np.searchsorted(starts, range(len(graph.ops)), side="right")]
    group_of = {name: number for number, group in enumerate(cost.groups) for name in group.ops}
    keepers = [Keeper(group_of[op.name], segment[i]) for i, op in enumerate(graph.ops)]
    activations = activations_by_storage(pricing, keepers)
    groups = tuple(in_segments(cost.groups, graph, segment, restored_bytes(pricing, segment)))
    saved, kept, shared = [0] * len(groups), [0] * len(groups), list[ResidentTensor]()
    for tensor in (*unnamed_tensors(pricing, keepers, groups), *saved_tensors(pricing, activations)):
        assert tensor.activation is not None
        entered = tensor.activation.entered_by
        if entered is not None:
            kept[entered.group] += tensor.num_bytes
        if not is_of_one_group(tensor.activation, groups):
            shared.append(tensor)
            continue
        for number in tensor.groups:
            saved[number] += tensor.num_bytes
            kept[number] += tensor.num_bytes * (groups[number].segment == NO_SEGMENT)
    return replace(
        cost,
        groups=tuple(replace(g, saved_bytes=saved[i], kept_bytes=kept[i]) for i, g in enumerate(groups)),
        edges=tuple(with_activations(cost.edges, pricing, activations)),
        saved=tuple(shared),
    )


def in_segments(
    groups: Sequence[Group], graph: Graph, segment: Sequence[int], restored: Sequence[int]
) -> Iterator[Group]:
    """The groups with their segments and ``segment_bytes``.

    Args:
        segment: of each operation.
        restored: bytes that are allocated while an operation's backward runs, from `restored_bytes`.
    """
    place = {op.name: i for i, op in enumerate(graph.ops)}
    for group in groups:
        at = [place[name] for name in group.ops]
        numbers = [segment[place[group.name]], *sorted(segment[i] for i in at)] if at else []
        most = max((restored[i] for i in at), default=0)
        yield replace(group, segments=tuple(dict.fromkeys(numbers)), segment_bytes=most)


def restored_bytes(pricing: Pricing, segment: Sequence[int]) -> list[int]:
    """For each operation the bytes that it and earlier operations of its segment save within the segment."""
    restored = [0 if number == NO_SEGMENT else unnamed_bytes(pricing, i) for i, number in enumerate(segment)]
    for storage, life in lifetimes(pricing.graph, pricing.stats).items():
        if life.saved_at is not None and life.made_at >= 0:
            inside = segment[life.saved_at] == segment[life.made_at] != NO_SEGMENT
            restored[life.saved_at] += pricing.num_bytes(storage) if inside else 0
    for i in range(1, len(segment)):
        restored[i] += restored[i - 1] if segment[i] == segment[i - 1] else 0
    return restored


# -- activations -----------------------------------------------------------------------------------------------------


def activations_by_storage(pricing: Pricing, keepers: Sequence[Keeper]) -> Mapping[str, Activation]:
    """Keepers of each storage that is saved, or that enters a segment; weights are left out."""
    alive = lifetimes(pricing.graph, pricing.stats)
    saved_by: defaultdict[str, set[Keeper]] = defaultdict(set)
    entered_by: dict[str, Keeper] = {}
    for keeper, op in zip(keepers, pricing.graph.ops, strict=True):
        for name in pricing.stats.ops[op.name].saved_names(op):
            saved_by[pricing.storage.get(name, name)].add(keeper)
        for storage in (pricing.storage.get(name, name) for name in op.reads):
            if storage in alive and storage not in entered_by and keeper.segment != NO_SEGMENT:
                made_at = alive[storage].made_at
                if made_at < 0 or keepers[made_at].segment != keeper.segment:
                    entered_by[storage] = keeper
    return {
        name: Activation(tuple(sorted(saved_by[name])), entered_by.get(name))
        for name in alive
        if name in saved_by or name in entered_by
    }


def saved_tensors(pricing: Pricing, activations: Mapping[str, Activation]) -> Iterator[ResidentTensor]:
    """A tensor for each storage that is saved, or that enters a segment."""
    for name, activation in activations.items():
        groups = tuple(dict.fromkeys(keeper.group for keeper in activation.saved_by))
        yield ResidentTensor(name, pricing.num_bytes(name), groups, activation=activation)


def unnamed_tensors(pricing: Pricing, keepers: Sequence[Keeper], groups: Sequence[Group]) -> Iterator[ResidentTensor]:
    """For each group and segment one tensor for what its operations save besides their operands and outputs."""
    num_bytes: defaultdict[Keeper, int] = defaultdict(int)
    for i, keeper in enumerate(keepers):
        num_bytes[keeper] += unnamed_bytes(pricing, i)
    for keeper, size in num_bytes.items():
        if size:
            name = f"{groups[keeper.group].name}, segment {keeper.segment}"
            yield ResidentTensor(name, size, (keeper.group,), activation=Activation((keeper,)))


def unnamed_bytes(pricing: Pricing, number: int) -> int:
    """Bytes that an operation saves besides its operands and outputs, such as a mask."""
    op = pricing.graph.ops[number]
    return round(pricing.scaled(pricing.stats.ops[op.name].saved_bytes, op.name))


def is_of_one_group(activation: Activation, groups: Sequence[Group]) -> bool:
    """Whether ``saved_bytes`` and ``kept_bytes`` of groups can hold an activation, whatever segments recompute.

    At most one group saves it, and no checkpoint keeps it at the same time. Each keeper is in its group's own segment.
    """
    entered, saved_by = activation.entered_by, activation.saved_by
    keepers = (*saved_by, *([entered] if entered is not None else []))
    if len(saved_by) > 1 or any(groups[k.group].segment != k.segment for k in keepers):
        return False
    return entered is None or all(k == entered or NO_SEGMENT < k.segment <= entered.segment for k in saved_by)


def with_activations(
    edges: Sequence[TensorEdge], pricing: Pricing, activations: Mapping[str, Activation]
) -> Iterator[TensorEdge]:
    """The edges with the keepers of their memory from the producer on; of several views only a whole first one has."""
    seen = set[str]()
    for edge in edges:
        storage = pricing.storage.get(edge.value, edge.value)
        known = activations.get(storage)
        whole = storage not in seen and edge.num_bytes == pricing.num_bytes(storage)
        seen.add(storage)
        yield replace(edge, activation=known.since(edge.producer)) if known is not None and whole else edge
