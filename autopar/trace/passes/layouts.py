"""Memory layout of the values that one compiled region hands to the next: rows contiguous, or channels last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, Op, Ref, Value, refs
from autopar.ops.gradient_layout import CHANNELS_LAST
from autopar.ops.regions import region_starts
from autopar.ops.registry import meta_results, meta_tensor
from autopar.trace.passes.rewrite import Expansion

# Views of one layout, and the operation that also takes others.
ANY_LAYOUT = {"aten.view.default": "aten.reshape.default", "aten.view_as.default": "aten.reshape_as.default"}
FIXED_LAYOUT = "aten.as_strided.default"  # reads memory without regard to the layout


def contiguous_borders(graph: Graph) -> Graph:
    """The graph with a contiguous copy of each transposed value that a later region reads.

    The values after it follow its layout, so one copy serves all blocks of a model that keeps tokens in the layout of a
    convolution. There each norm would read across rows, and each region would copy the gradients at its ends. Inside
    one graph torch.compile chooses layouts; what two graphs share has the layout of the trace.
    """
    if any(op.target == FIXED_LAYOUT for op in graph.ops):
        return graph
    while (found := next(transposed(graph), None)) is not None:
        graph = with_copy(graph, *found)
    return graph


def transposed(graph: Graph) -> Iterator[tuple[int, Value]]:
    """Transposed values that a later region reads, with the positions of their operations."""
    starts, number = set(region_starts(graph.ops)), -1
    made_in: dict[str, int] = {}
    handed_on: set[str] = set()
    for position, op in enumerate(graph.ops):
        number += position in starts
        handed_on |= {name for name in op.reads if made_in.get(name, number) != number}
        made_in |= dict.fromkeys((value.name for value in op.outputs), number)
    kept = handed_on - set(refs(graph.outputs))
    for position, op in enumerate(graph.ops):
        yield from ((position, value) for value in op.outputs if value.name in kept and is_transposed(value))


def is_transposed(value: Value) -> bool:
    """Whether the last dim of a dense tensor is not the innermost in memory, nor its channels."""
    if value.shape[-1:] in ((), (1,)) or value.stride[-1] == 1 or not value.dtype.startswith(("float", "bfloat")):
        return False
    if any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride)):
        return False
    channels_last = CHANNELS_LAST.get(len(value.shape))
    return channels_last is None or not meta_tensor(value).is_contiguous(memory_format=channels_last)


def with_copy(graph: Graph, position: int, value: Value) -> Graph:
    """The graph with a contiguous copy of a value after its operation, which all later operations read."""
    copy = Expansion(graph.ops[position], {value.name: value}, graph.readable)
    name = copy.add("aten.contiguous.default", Ref(value.name)).name
    changed = {name: copy.values[name]}  # values whose layout is another than in the graph
    later: list[Op] = []
    for op in graph.ops[position + 1 :]:
        if value.name in op.reads:
            op = op.reading({read: name if read == value.name else read for read in op.reads})
        if not changed.keys().isdisjoint(op.reads):
            op = restrided(op, [changed.get(read) or graph.readable[read] for read in op.reads])
            changed |= {v.name: v for v in op.outputs if v != graph.values[v.name]}
        later.append(op)
    return replace(graph, ops=(*graph.ops[: position + 1], *copy.ops, *later))


def restrided(op: Op, read: Sequence[Value]) -> Op:
    """The operation with the layouts of its outputs that follow from those of the values that it reads."""
    op = replace(op, target=ANY_LAYOUT.get(op.target, op.target))
    made = meta_results(op, read)
    return replace(op, outputs=tuple(replace(v, stride=t.stride()) for v, t in zip(op.outputs, made, strict=True)))
