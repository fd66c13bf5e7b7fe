"""Memory layout of values: of images in convolutions, and of what one compiled region hands to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from autopar.ir.graph import LAYOUT_COPY, Graph, Op, Ref, Value, refs, renamed
from autopar.ops.gradient_layout import CHANNELS_LAST
from autopar.ops.padded_convolution import has_padded_groups
from autopar.ops.regions import CONVOLUTIONS, packet, region_starts, writes_into_value
from autopar.ops.registry import for_each_dim, memory_of, meta_tensor, named_arguments, results_of
from autopar.trace.fake import fake_tensors
from autopar.trace.passes.rewrite import Expansion

# Views of one layout, and the operation that also takes others.
ANY_LAYOUT = {"aten.view.default": "aten.reshape.default", "aten.view_as.default": "aten.reshape_as.default"}
# They read memory as it lies.
FIXED_LAYOUTS = frozenset(("aten.as_strided.default", "aten.view.dtype", "aten.view_as_complex.default"))
SMALL_CHANNELS = 64


def channels_last_images(graph: Graph) -> Graph:
    """The graph with images in channels last for its convolutions, where torch.compile would compute so.

    torch.compile chooses the layout of a graph's inside (`torch._inductor.graph.GraphLowering.decide_layout_opt`).
    Between regions it may not, and would copy images and gradients at both ends of each. The values after a copy follow
    its layout, so that one copy of the model's images serves a model of convolutions. Results that were contiguous are.
    """
    if not gain_from_channels_last(graph):
        return graph
    given, position = graph, 0
    while position < len(graph.ops):
        op = graph.ops[position]
        if is_convolution(op):
            x = graph.readable[image_of(op).name]
            if not meta_tensor(x).is_contiguous(memory_format=torch.channels_last):
                graph = with_copy(graph, position, x, torch.channels_last)
                position += 1
        position += 1
    return with_contiguous_results(graph, given)


def with_contiguous_results(graph: Graph, given: Graph) -> Graph:
    """The graph with contiguous copies of those results that are contiguous in the given one alone."""
    names = {name: name for name in refs(graph.outputs)}
    for name in names:
        value, before = graph.readable[name], given.readable[name]
        if value != before and meta_tensor(before).is_contiguous():
            graph = with_copy(graph, len(graph.ops), value, torch.contiguous_format)
            names[name] = graph.ops[-1].name
    return replace(graph, outputs=renamed(graph.outputs, names))


def gain_from_channels_last(graph: Graph) -> bool:
    """Whether torch.compile would move a graph's convolutions to channels last. Those of patches do not count.

    It would not for grouped ones, of which autopar pads those in 16 bits. It stays where an operation needs the layout
    that is given: one that reads memory as it lies, or writes into a view; and where images are later written.
    """
    if any(op.target in FIXED_LAYOUTS or writes_into_value(op) for op in graph.ops):
        return False
    written = written_memory(graph)
    if any(memory_of(graph, image_of(op).name) in written for op in graph.ops if is_convolution(op)):
        return False
    convolutions = [op for op in graph.ops if is_convolution(op) and not is_of_patches(graph, op)]
    shapes = [graph.readable[named_arguments(op)["weight"].name].shape for op in convolutions]
    grouped = any(has_slow_groups(op, shape) for op, shape in zip(convolutions, shapes))
    narrowing = any(2 * shape[0] <= shape[1] and shape[2] > 1 for shape in shapes)
    small = all(max(shape[:2]) <= SMALL_CHANNELS for shape in shapes)
    return not (grouped or narrowing or small)


def has_slow_groups(op: Op, weight: Sequence[int]) -> bool:
    """Whether cuDNN is slow at a grouped convolution in channels last: not where autopar pads the groups."""
    groups = named_arguments(op)["groups"]
    return groups > 1 and weight[1] > 1 and not has_padded_groups(op, weight, groups)


def is_convolution(op: Op) -> bool:
    """Whether an operation is a convolution of a batch of images."""
    return packet(op) in CONVOLUTIONS and len(op.outputs[0].shape) == 4


def image_of(op: Op) -> Ref:
    """The images that a convolution reads."""
    image = named_arguments(op)["input"]
    assert isinstance(image, Ref), f"{op.name}: a convolution of constants"
    return image


def is_of_patches(graph: Graph, op: Op) -> bool:
    """Whether a convolution has the stride of its kernel, of more than one position."""
    given = named_arguments(op)
    kernel = tuple(graph.readable[given["weight"].name].shape[2:])
    return max(kernel) > 1 and for_each_dim(given["stride"], len(kernel)) == kernel


def contiguous_borders(graph: Graph) -> Graph:
    """The graph with a contiguous copy of each transposed value that a later region reads.

    The values after it follow its layout, so one copy serves all blocks of a model that keeps tokens in the layout of a
    convolution. There each norm would read across rows, and each region would copy the gradients at its ends. Inside
    one graph torch.compile chooses layouts; what two graphs share has the layout of the trace.
    """
    if any(op.target in FIXED_LAYOUTS for op in graph.ops):
        return graph
    while (found := next(transposed(graph), None)) is not None:
        position, value = found
        graph = with_copy(graph, position + 1, value, torch.contiguous_format)
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
    written = written_memory(graph)
    kept = {name for name in handed_on - {*refs(graph.outputs)} if memory_of(graph, name) not in written}
    for position, op in enumerate(graph.ops):
        yield from ((position, value) for value in op.outputs if value.name in kept and is_transposed(value))


def written_memory(graph: Graph) -> frozenset[str]:
    """Names of weights and values that operations write in place, directly or through views."""
    values = (memory_of(graph, op.args[0].name) for op in graph.ops if writes_into_value(op))
    return frozenset((*values, *(name for op in graph.ops for name in op.mutates)))


def is_transposed(value: Value) -> bool:
    """Whether the last dim of a dense tensor is not the innermost in memory, nor its channels."""
    if value.shape[-1:] in ((), (1,)) or value.stride[-1] == 1 or not value.dtype.startswith(("float", "bfloat")):
        return False
    if any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride)):
        return False
    channels_last = CHANNELS_LAST.get(len(value.shape))
    return channels_last is None or not meta_tensor(value).is_contiguous(memory_format=channels_last)


def with_copy(graph: Graph, position: int, value: Value, layout: torch.memory_format) -> Graph:
    """The graph with a copy of a value in some layout, which the operations from a position on read."""
    maker = graph.producer.get(value.name)
    copy = Expansion(maker or graph.ops[position], {value.name: value}, graph.readable)
    name = copy.fresh(f"{value.name if maker is None else maker.name}.{LAYOUT_COPY}")
    copy.append(name, "aten.contiguous.default", (Ref(value.name),), {"memory_format": layout})
    changed = {name: copy.values[name]}  # values whose layout is another than in the graph
    later: list[Op] = []
    for op in graph.ops[position:]:
        if value.name in op.reads:
            op = op.reading({read: name if read == value.name else read for read in op.reads})
        if not changed.keys().isdisjoint(op.reads):
            op = restrided(op, [changed.get(read) or graph.readable[read] for read in op.reads])
            changed |= {v.name: v for v in op.outputs if v != graph.values[v.name]}
        later.append(op)
    copies = (replace(op, traced="") for op in copy.ops)
    return replace(graph, ops=(*graph.ops[:position], *copies, *later))


def restrided(op: Op, read: Sequence[Value]) -> Op:
    """The operation with the layouts of its outputs that follow from those of the values that it reads."""
    if op.target in ANY_LAYOUT:
        op = replace(op, target=ANY_LAYOUT[op.target], traced=op.target)
    with fake_tensors(read) as tensors:
        made = results_of(op, tensors)
    return replace(op, outputs=tuple(replace(v, stride=t.stride()) for v, t in zip(op.outputs, made, strict=True)))
