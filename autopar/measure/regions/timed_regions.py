"""A graph as pieces that are timed alone: the regions that torch.compile sees, without what names them in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.codegen.regions import regions_of
from autopar.ir.graph import Graph, Op, Weight, renamed
from autopar.ir.program import Edge, Program

ANY_FRACTION = 0.5  # stands for every number that is not whole: none decides on a kernel's time
RANDOM_OP = "autopar.uniform.default"  # has the name of what draws as an argument


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


def timed_regions(graph: Graph) -> Iterator[TimedRegion]:
    """The pieces of what a rank runs, in order; in training."""
    for region in regions_of(graph):
        yield TimedRegion(
            anonymous_program(region.ops, region.reads, region.makes, graph), tuple(op.name for op in region.ops)
        )


def anonymous_program(ops: tuple[Op, ...], reads: tuple[str, ...], makes: tuple[str, ...], graph: Graph) -> Program:
    """A program of some operations in which names are numbers; what other operations make is received."""
    weight_names = dict.fromkeys(name for op in ops for name in (*op.reads, *op.mutates) if name in graph.weight)
    names = {name: f"w{k}" for k, name in enumerate(weight_names)} | {name: f"x{k}" for k, name in enumerate(reads)}
    renamed_ops: list[Op] = []
    for number, op in enumerate(ops):
        name = f"v{number}"
        names |= {v.name: v.name.replace(op.name, name, 1) for v in op.outputs}
        renamed_ops.append(
            Op(
                name=name,
                target=op.target,
                args=tuple(normalized_argument(renamed(a, names), op) for a in op.args),
                kwargs=tuple((key, normalized_argument(renamed(a, names), op)) for key, a in op.kwargs),
                outputs=tuple(replace(v, name=names[v.name]) for v in op.outputs),
                module="",
                mutates=tuple(names[n] for n in op.mutates),
            )
        )
    input_names = {v.name for v in graph.inputs}
    values = {name: replace(graph.values[name], name=names[name]) for name in (*reads, *makes)}
    return Program(
        stage=1,
        mode=graph.mode,
        batch=graph.batch,
        inputs=tuple(values[name] for name in reads if name in input_names),
        receives=tuple(Edge(values[name], 0, 1) for name in reads if name not in input_names),
        weights=tuple(renamed_weight(graph.weight[name], names[name]) for name in weight_names),
        ops=tuple(renamed_ops),
        sends=tuple(Edge(values[name], 1, 2) for name in makes),
    )


def renamed_weight(weight: Weight, name: str) -> Weight:
    """A weight as a piece knows it."""
    return Weight(
        name, weight.kind, weight.shape, weight.dtype, weight.requires_grad, master=weight.master, order=weight.order
    )


def normalized_argument(argument: Any, op: Op) -> Any:
    """An argument without what differs between equal blocks: probabilities, scales, names of random operations."""
    if isinstance(argument, tuple):
        return tuple(normalized_argument(a, op) for a in argument)
    if isinstance(argument, float) and not argument.is_integer():
        return ANY_FRACTION
    return "random" if op.target == RANDOM_OP and argument == op.name else argument
