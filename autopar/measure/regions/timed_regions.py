"""A graph as regions that are timed alone: those that torch.compile sees, without the model's names.

Equal blocks of a model thus have equal programs, which are timed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.codegen.regions import numbered_ops, regions_of
from autopar.ir.graph import Graph, Op, Weight
from autopar.ir.hardware import ExecutionMode
from autopar.ir.program import Edge, Program
from autopar.ir.tensor_axes import TensorAxes
from autopar.runtime.launch.torch_settings import TorchSettings

ANY_FRACTION = 0.5  # replaces every number that is not whole: no kernel's time depends on its value
RANDOM_OP = "autopar.uniform.default"  # one of its arguments is the name of the random operation


@dataclass(frozen=True)
class TimedRegion:
    """Operations that are compiled together.

    Args:
        program: the operations under anonymous names.
        ops: their names in the graph.
    """

    program: Program
    ops: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """Text that identifies the program: everything other than the device that its time depends on."""
        return repr(self.program)


@dataclass(frozen=True)
class RegionTask:
    """Regions that a worker process times, and how it runs them.

    Args:
        regions: each a program and its tensor axes.
        threads: of each process, on CPU; 0 on GPUs.
    """

    regions: tuple[tuple[Program, TensorAxes], ...]
    device_type: str
    execution_mode: ExecutionMode
    threads: int
    settings: TorchSettings


def timed_regions(graph: Graph) -> Iterator[TimedRegion]:
    """The regions of a training graph that one rank runs, in order."""
    for region in regions_of(graph):
        yield TimedRegion(
            anonymous_program(region.ops, region.reads, region.makes, graph), tuple(op.name for op in region.ops)
        )


def anonymous_program(ops: tuple[Op, ...], reads: tuple[str, ...], makes: tuple[str, ...], graph: Graph) -> Program:
    """A program of some operations, whose weights, reads and results are named w0 …, x0 … and v0 ….

    Args:
        reads: values from outside the region: inputs of the graph stay inputs, all others are received.
        makes: values that the region sends.
    """
    weight_names = dict.fromkeys(name for op in ops for name in (*op.reads, *op.mutates) if name in graph.weight)
    numbered = numbered_ops(ops, weight_names, reads)
    names = numbered.names
    renamed_ops = [
        Op(
            name=new.name,
            target=new.target,
            args=tuple(normalized_argument(a, op) for a in new.args),
            kwargs=tuple((key, normalized_argument(a, op)) for key, a in new.kwargs),
            outputs=new.outputs,
            module="",
            mutates=new.mutates,
        )
        for op, new in zip(ops, numbered.ops, strict=True)
    ]
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
    """A weight under another name, without its shardings and the model's names."""
    return Weight(
        name, weight.kind, weight.shape, weight.dtype, weight.requires_grad, master=weight.master, order=weight.order
    )


def normalized_argument(argument: Any, op: Op) -> Any:
    """An argument without what differs between equal blocks: probabilities, scales, and names of random operations."""
    if isinstance(argument, tuple):
        return tuple(normalized_argument(a, op) for a in argument)
    if isinstance(argument, float) and not argument.is_integer():
        return ANY_FRACTION
    return "random" if op.target == RANDOM_OP and argument == op.name else argument
