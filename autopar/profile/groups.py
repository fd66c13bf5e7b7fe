"""Contraction of operations into groups that always share a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir import Graph, Op

# An operation that takes this share of all seconds is worth a cut of its own even without weights or FLOPs.
HEAVY = 0.005


@dataclass(frozen=True)
class Members:
    """The operations of one group in execution order, and the one that it is named after."""

    anchor: Op
    ops: tuple[Op, ...]


def group_ops(graph: Graph, seconds: Mapping[str, float], flops: Mapping[str, float]) -> tuple[Members, ...]:
    """Every operation in one group, numbered so that tensors flow from lower to higher groups only.

    Operations are walked in execution order. An anchor opens a new group: it reads a weight, has FLOPs, or is heavy.
    Any other one joins the latest group that it reads from. Operations that read no group yet (constants, expanded
    weights, preprocessing of an input) wait for their first reader.

    Args:
        seconds: forward and backward of each operation.
        flops: forward FLOPs of each operation.
    """
    assigned: dict[str, int] = {}
    waiting: dict[str, Op] = {}
    anchors: list[Op] = []
    fed = fed_by_inputs(graph)
    heavy = HEAVY * sum(seconds.values())
    for op in graph.ops:
        pulled = tuple(waiting_sources(op, graph, waiting))
        sources = [assigned[p.name] for o in (op, *pulled) for p in producers(o, graph) if p.name in assigned]
        worth_a_cut = flops[op.name] > 0 or seconds[op.name] >= heavy or any(r in graph.weight for r in op.reads)
        if op.name in fed and worth_a_cut:
            anchors.append(op)
            number = len(anchors) - 1
        elif sources:
            number = max(sources)
        else:
            waiting[op.name] = op
            continue
        for member in (op, *pulled):
            assigned[member.name] = number
            waiting.pop(member.name, None)
    for op in waiting.values():
        assigned[op.name] = group_of_unread(op, graph, assigned)
    members: dict[int, list[Op]] = {}
    for op in graph.ops:
        members.setdefault(assigned[op.name], []).append(op)
    return tuple(Members(anchors[i] if anchors else ops[0], tuple(ops)) for i, ops in sorted(members.items()))


def producers(op: Op, graph: Graph) -> Iterator[Op]:
    """The operations behind what an operation reads."""
    return (graph.producer[r] for r in op.reads if r in graph.producer)


def fed_by_inputs(graph: Graph) -> frozenset[str]:
    """Names of the operations and values that depend on a graph input; they grow with the batch."""
    fed = {v.name for v in graph.inputs}
    for op in graph.ops:
        if fed.intersection(op.reads):
            fed.add(op.name)
            fed.update(v.name for v in op.outputs)
    return frozenset(fed)


def waiting_sources(op: Op, graph: Graph, waiting: Mapping[str, Op]) -> Iterator[Op]:
    """Waiting operations that one depends on, directly or through each other, each once."""
    stack, seen = [op], set()
    while stack:
        for source in producers(stack.pop(), graph):
            if source.name in waiting and source.name not in seen:
                seen.add(source.name)
                stack.append(source)
                yield source


def group_of_unread(op: Op, graph: Graph, assigned: Mapping[str, int]) -> int:
    """Group of an operation that no group reads, such as a counter's update: its module's, else the last."""
    last = max(assigned.values(), default=0)
    of_module = next((assigned[o.name] for o in graph.ops if o.module == op.module and o.name in assigned), last)
    return max([of_module, *(assigned[p.name] for p in producers(op, graph))])
