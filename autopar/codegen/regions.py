"""Compiled regions of a graph that runs as one program."""

from __future__ import annotations

from autopar.codegen.activation_checkpoint import Segment, cut_segments
from autopar.codegen.split import split
from autopar.ir.graph import Graph
from autopar.ops.regions import region_starts


def regions_of(graph: Graph) -> tuple[Segment, ...]:
    """Regions of a graph on a single stage, as `autopar.codegen.emit.graph_module` compiles them."""
    (program,) = split(graph, dict.fromkeys((op.name for op in graph.ops), 0), 1)
    starts = region_starts(program.ops, program.output_boundaries)
    return cut_segments(program.ops, starts, graph.weight, program.results, "region")
