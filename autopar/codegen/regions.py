"""The regions of a whole graph, as it is compiled."""

from __future__ import annotations

from autopar.codegen.activation_checkpoint import Segment, cut_segments
from autopar.codegen.split import split
from autopar.ir.graph import Graph
from autopar.ops.regions import region_starts


def regions_of(graph: Graph) -> tuple[Segment, ...]:
    """The regions of a graph that is a program by itself, as `autopar.codegen.emit.graph_module` compiles them."""
    (program,) = split(graph, dict.fromkeys((op.name for op in graph.ops), 0), 1)
    starts = region_starts(program.ops, program.output_boundaries)
    return cut_segments(program.ops, starts, graph.weight, program.results, "region")
