"""Compiled regions of a graph that runs as one program, and operations without the names that tell regions apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.codegen.activation_checkpoint import Segment, cut_segments
from autopar.codegen.split import split
from autopar.ir.graph import Graph, Op
from autopar.ops.regions import region_starts


def regions_of(graph: Graph) -> tuple[Segment, ...]:
    """Regions of a graph on a single stage, as `autopar.codegen.emit.graph_module` compiles them."""
    (program,) = split(graph, dict.fromkeys((op.name for op in graph.ops), 0), 1)
    bounds = (*region_starts(program.ops, program.output_boundaries), len(program.ops))
    return cut_segments(program.ops, pairwise(bounds), graph.weight, program.results, "region")


@dataclass(frozen=True)
class NumberedOps:
    """Operations whose names are numbers, and the new name of every weight and value."""

    ops: tuple[Op, ...]
    names: Mapping[str, str]


def numbered_ops(ops: Sequence[Op], weights: Iterable[str], reads: Iterable[str]) -> NumberedOps:
    """The operations as v0, v1, …, with their weights as w0, w1, … and the values that they read as x0, x1, …"""
    names = {name: f"w{k}" for k, name in enumerate(weights)} | {name: f"x{k}" for k, name in enumerate(reads)}
    result: list[Op] = []
    for number, op in enumerate(ops):
        name = f"v{number}"
        names |= {v.name: v.name.replace(op.name, name, 1) for v in op.outputs}
        outputs = tuple(replace(v, name=names[v.name]) for v in op.outputs)
        mutates = tuple(names[n] for n in op.mutates)
        result.append(replace(op.reading(names), name=name, outputs=outputs, mutates=mutates))
    return NumberedOps(tuple(result), names)
