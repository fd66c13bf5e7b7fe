"""Activation checkpointing: segments of a program, and the module whose backward runs a segment's forward again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.ir.graph import Op
from autopar.ir.program import Program
from autopar.ops.registry import operator

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Segment:
    """Operations that run together as one module; ``reads`` and ``makes`` are the values that enter and leave it."""

    name: str
    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]

    @property
    def mutates(self) -> tuple[str, ...]:
        """Weights that the segment updates in place, each once."""
        return tuple(dict.fromkeys(name for op in self.ops for name in op.mutates))

    @property
    def is_random(self) -> bool:
        """Whether an operation may draw from torch's random generators."""
        return any(torch.Tag.nondeterministic_seeded in operator(op.target).tags for op in self.ops)


def segments_of(program: Program) -> tuple[Segment, ...]:
    """The checkpointed segments of a program, in order."""
    weights = {w.name for w in program.weights}
    return cut_segments(program.ops, pairwise(program.segments), weights, program.results, "segment")


def cut_segments(
    ops: Sequence[Op], spans: Iterable[tuple[int, int]], weights: Collection[str], results: Collection[str], name: str
) -> tuple[Segment, ...]:
    """Segments ``name_0``, ``name_1``, … of a run of operations.

    Args:
        spans: of each segment the indices in ``ops`` of its first operation and of the operation after its last.
        weights: names that are no inputs of a segment.
        results: names that are read after the last operation.
    """
    found = []
    for number, (start, end) in enumerate(spans):
        own = ops[start:end]
        made = {value.name for op in own for value in op.outputs}
        read = dict.fromkeys(n for op in own for n in op.reads if n not in made and n not in weights)
        wanted = {n for op in ops[end:] for n in op.reads} | {*results}
        makes = (value.name for op in own for value in op.outputs if value.name in wanted)
        found.append(Segment(f"{name}_{number}", tuple(own), tuple(read), tuple(makes)))
    return tuple(found)


class CheckpointedSegment(nn.Module):
    """Runs ``body`` and saves only its arguments; the backward runs ``body`` again.

    The second run repeats the first: random operations draw the same numbers, and tensors that it updates in place
    have their earlier values. Afterwards these tensors have the values of a single run.

    Args:
        updated: tensors that the body updates in place.
        draws: whether the body draws random numbers.
    """

    def __init__(self, body: fx.GraphModule, updated: Sequence[Tensor], draws: bool) -> None:
        super().__init__()
        self.body, self.is_random = body, draws
        self.contexts = update_once(updated) if updated else None

    def forward(self, *args: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.body(*args)
        if self.contexts is None or torch.compiler.is_compiling():
            # torch.compile turns the updates into outputs of the first run, and does not support context_fn.
            return checkpoint(self.body, *args, use_reentrant=False, preserve_rng_state=self.is_random)
        return checkpoint(
            self.body, *args, use_reentrant=False, preserve_rng_state=self.is_random, context_fn=self.contexts
        )


def update_once(updated: Sequence[Tensor]) -> Contexts:
    """The ``context_fn`` of a checkpoint: called at the start of a forward, returns contexts of both its runs."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), with_earlier_values(updated, [tensor.clone() for tensor in updated])

    return contexts


@contextmanager
def with_earlier_values(updated: Sequence[Tensor], before: Sequence[Tensor]) -> Iterator[None]:
    """Context in which the tensors have their values of ``before``; on exit they get their present values back."""
    now = [tensor.clone() for tensor in updated]
    overwrite(updated, before)
    try:
        yield
    finally:  # torch ends the second run with an exception once it has all saved tensors
        overwrite(updated, now)


def overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def call_segment(graph: fx.Graph, segment: Segment, nodes: dict[str, fx.Node], names: Mapping[str, str]) -> None:
    """Append the call of a segment's module to ``graph``, and a node for each value that leaves it."""
    inputs = tuple(nodes[name] for name in segment.reads)
    node = graph.create_node("call_module", segment.name, inputs, name=names[segment.name])
    for k, name in enumerate(segment.makes):
        nodes[name] = graph.create_node("call_function", getitem, (node, k), name=names[name])


def segment_source(segment: Segment, module: fx.GraphModule) -> list[str]:
    """Lines of a segment's generated code, as a function with the segment's name."""
    body = module.get_submodule(f"{segment.name}.body")
    assert isinstance(body, fx.GraphModule)
    return ["", *body.code.strip().replace("def forward(", f"def {segment.name}(", 1).splitlines()]
