"""A graph as pieces that are timed alone: the regions that torch.compile sees, without what names them in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.codegen.regions import numbered_ops, regions_of
from autopar.ir.graph import Graph, Op, Weight
from autopar.ir.program import Edge, Program

ANY_FRACTION = 0.5  # stands for every number that is not whole: none decides on a kernel's time
RANDOM = "autopar.uniform.default"  # has the name of what draws as an argument


@dataclass(frozen=True)
class TimedRegion:
    """Operations that become kernels together.

    Equal pieces of a model, such as its blocks, have equal programs. ``ops`` are their names in the graph.
    """

    program: Program
    ops: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """Everything that its time depends on but the device."""
        return repr(self.program)


def pieces_of(graph: Graph) -> Iterator[TimedRegion]:
    """The pieces of what a rank runs, in order; in training."""
    for region in regions_of(graph):
        yield TimedRegion(anonymous(region.ops, region.reads, region.makes, graph), tuple(op.name for op in region.ops))


def anonymous(ops: tuple[Op, ...], reads: tuple[str, ...], makes: tuple[str, ...], graph: Graph) -> Program:
    """A program of some operations in which names are numbers; what other operations make is received."""
    held = dict.fromkeys(name for op in ops for name in (*op.reads, *op.mutates) if name in graph.weight)
    numbered = numbered_ops(ops, held, reads)
    names = numbered.names
    own = [
        Op(
            name=new.name,
            target=new.target,
            args=tuple(plain(a, op) for a in new.args),
            kwargs=tuple((key, plain(a, op)) for key, a in new.kwargs),
            outputs=new.outputs,
            module="",
            mutates=new.mutates,
        )
        for op, new in zip(ops, numbered.ops, strict=True)
    ]
    given = {v.name for v in graph.inputs}
    values = {name: replace(graph.values[name], name=names[name]) for name in (*reads, *makes)}
    return Program(
        stage=1,
        mode=graph.mode,
        batch=graph.batch,
        inputs=tuple(values[name] for name in reads if name in given),
        receives=tuple(Edge(values[name], 0, 1) for name in reads if name not in given),
        weights=tuple(weight(graph.weight[name], names[name]) for name in held),
        ops=tuple(own),
        sends=tuple(Edge(values[name], 1, 2) for name in makes),
    )


def weight(found: Weight, name: str) -> Weight:
    """A weight as a piece knows it."""
    return Weight(
        name, found.kind, found.shape, found.dtype, found.requires_grad, master=found.master, order=found.order
    )


def plain(argument: Any, op: Op) -> Any:
    """An argument without what differs between equal blocks: probabilities, scales, names of random operations."""
    if isinstance(argument, tuple):
        return tuple(plain(a, op) for a in argument)
    if isinstance(argument, float) and not argument.is_integer():
        return ANY_FRACTION
    return "random" if op.target == RANDOM and argument == op.name else argument
