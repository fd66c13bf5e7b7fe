"""Groups of operations that always share a stage: the nodes of the cost graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.cost_graph import Group
from autopar.ir.graph import Graph, Op

# An operation that takes this share of all seconds opens a group even without weights or FLOPs.
MIN_ANCHOR_SHARE = 0.005


@dataclass(frozen=True)
class OpGroup:
    """The operations of one group in execution order; the group has the name of its ``anchor``."""

    anchor: Op
    ops: tuple[Op, ...]


def group_ops(graph: Graph, seconds: Mapping[str, float], flops: Mapping[str, float]) -> tuple[OpGroup, ...]:
    """Groups of all operations, numbered so that tensors go from lower to higher groups only.

    Operations are visited in execution order. An anchor opens a new group: it reads a weight, has FLOPs, or takes at
    least `MIN_ANCHOR_SHARE` of all seconds, and is no copy for the sake of layouts. Any other operation joins the
    latest group that it reads from. Two kinds of operations wait for their first reader: those that read no group yet
    (preprocessing of an input), and those that depend on no input (constants, expanded weights). An inserted collective
    joins the group of its home.

    Args:
        seconds: forward and backward seconds of each operation.
        flops: forward FLOPs of each operation.
    """
    assigned: dict[str, int] = {}
    waiting: dict[str, Op] = {}
    anchors: list[Op] = []
    fed = batch_dependent_names(graph)
    heavy = MIN_ANCHOR_SHARE * sum(seconds.values())
    for op in traced_ops(graph):
        pulled = tuple(waiting_sources(op, graph, waiting))
        sources = [assigned[p.name] for o in (op, *pulled) for p in producers(o, graph) if p.name in assigned]
        worth_a_cut = flops[op.name] > 0 or seconds[op.name] >= heavy or reads_weight(op, graph)
        if op.name in fed and worth_a_cut and not op.is_layout_copy:
            anchors.append(op)
            number = len(anchors) - 1
        elif sources and op.name in fed:
            number = max(sources)
        else:
            waiting[op.name] = op
            continue
        for member in (op, *pulled):
            assigned[member.name] = number
            waiting.pop(member.name, None)
    of_module = defaultdict[str, list[Op]](list)
    for op in traced_ops(graph) if waiting else ():
        of_module[op.module].append(op)
    for op in waiting.values():
        assigned[op.name] = group_of_unread(op, graph, of_module[op.module], assigned, max(0, len(anchors) - 1))
    return tuple(
        OpGroup(anchors[i] if anchors else ops[0], tuple(ops))
        for i, ops in sorted(ops_by_group(graph, assigned).items())
    )


def group_sharded_ops(graph: Graph, groups: Sequence[Group]) -> tuple[OpGroup, ...]:
    """The operations of a local graph in the groups of the unsharded graph."""
    op_of = {op.name: op for op in graph.ops}
    group_of = {name: i for i, group in enumerate(groups) for name in group.ops}
    return tuple(OpGroup(op_of[groups[i].name], tuple(ops)) for i, ops in sorted(ops_by_group(graph, group_of).items()))


def ops_by_group(graph: Graph, group_of: Mapping[str, int]) -> Mapping[int, list[Op]]:
    """The operations of each group in execution order, by group number.

    An inserted collective joins the group of its home, or the lowest group that reads its output. An operation without
    FLOPs can be in a lower group than the home and read the same value.
    """
    lowest = {op.name: group_of[op.home or op.name] for op in graph.ops}
    for op in reversed(graph.ops):
        for name in op.reads:
            source = graph.producer.get(name)
            if source is not None and source.home:
                lowest[source.name] = min(lowest[source.name], lowest[op.name])
    members: dict[int, list[Op]] = {}
    for op in graph.ops:
        members.setdefault(lowest[op.name], []).append(op)
    return members


def traced_ops(graph: Graph) -> Iterator[Op]:
    """The operations of the traced model, without those that sharding inserted."""
    return (op for op in graph.ops if not op.home)


def original_reads(op: Op, graph: Graph) -> Iterator[str]:
    """Names of the values and weights that an operation reads, seen through inserted resharding operations."""
    for name in op.reads:
        source = graph.producer.get(name)
        if source is not None and source.home:
            yield from original_reads(source, graph)
        else:
            yield name


def reads_weight(op: Op, graph: Graph) -> bool:
    """Whether an operation reads a weight, directly or resharded."""
    return any(name in graph.weight for name in original_reads(op, graph))


def producers(op: Op, graph: Graph) -> Iterator[Op]:
    """The traced operations that make what an operation reads."""
    return (graph.producer[r] for r in original_reads(op, graph) if r in graph.producer)


def batch_dependent_names(graph: Graph) -> frozenset[str]:
    """Names of the operations and values that depend on a graph input; their sizes grow with the batch."""
    fed = {v.name for v in graph.inputs}
    for op in graph.ops:
        if fed.intersection(op.reads):
            fed.add(op.name)
            fed.update(v.name for v in op.outputs)
    return frozenset(fed)


def waiting_sources(op: Op, graph: Graph, waiting: Mapping[str, Op]) -> Iterator[Op]:
    """The waiting operations that ``op`` depends on, directly or through other waiting ones, each once."""
    stack, seen = [op], set()
    while stack:
        for source in producers(stack.pop(), graph):
            if source.name in waiting and source.name not in seen:
                seen.add(source.name)
                stack.append(source)
                yield source


def group_of_unread(op: Op, graph: Graph, of_module: Sequence[Op], assigned: Mapping[str, int], last: int) -> int:
    """Group of an operation that no group reads, such as a counter's update: its module's group, else the last.

    Args:
        of_module: the operations of its module in execution order.
    """
    number = next((assigned[o.name] for o in of_module if o.name in assigned), last)
    return max([number, *(assigned[p.name] for p in producers(op, graph))])
