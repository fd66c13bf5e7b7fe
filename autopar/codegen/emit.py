"""Code generation: from a program to a runnable, printable ``fx.GraphModule``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autopar.codegen.activation_checkpoint import (
    CheckpointedSegment,
    Segment,
    call_segment,
    cut_segments,
    segment_source,
    segments_of,
)
from autopar.codegen.compile import CompileAhead, compiled_region
from autopar.codegen.fusions.async_tp import fuse_async_tp
from autopar.codegen.fusions.pad_groups import pad_groups
from autopar.codegen.fusions.patch_embed import use_patch_embed
from autopar.codegen.fusions.wgrad import MainGradLookup, fuse_wgrad, no_main_grads
from autopar.ir.graph import LocalDevice, Op, Ref
from autopar.ir.names import unused_name
from autopar.ir.program import Program
from autopar.ir.units import plural
from autopar.ops.regions import region_starts, writes_into_value
from autopar.ops.registry import operator, views_of_weights

# Names that the code of an fx.GraphModule uses; arguments must not shadow them.
RESERVED = ("self", "torch", "device", "inf", "nan")
SAME_KEYS: Mapping[str, str] = MappingProxyType({})
WaitLookup = Callable[[Collection[str]], Callable[[], None] | None]


def no_waits(names: Collection[str]) -> None:
    """Weights that need no gather."""


def graph_module(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    axes: Mapping[str, str] = SAME_KEYS,
    waits: WaitLookup = no_waits,
    sums: MainGradLookup = no_main_grads,
    compiled: bool = False,
    ahead: CompileAhead | None = None,
) -> fx.GraphModule:
    """A module that computes one stage: takes ``program.arguments``, returns a tuple of ``program.results``.

    If the stage recomputes, each checkpointed segment is a submodule.

    Args:
        weights: at least the program's weights, by name; not copied, so that several modules can share them.
        device: replaces every device in the trace.
        axes: for each mesh axis the key of its communicator in `autopar.ops.collectives`; by default the axis's name.
        waits: returns a function that waits for weights which may have to be gathered (ZeRO), or None where none of
            them has. It is called before operations, regions and segments that read them.
        sums: returns the key of a weight's main gradient, into which its compiled linear layer accumulates, or None.
        compiled: compile the operations with torch.compile, region by region, at the first call.
        ahead: as in `autopar.codegen.compile.compiled_region`.
    """
    attributes: dict[str, Any] = {w.name: weights[w.name] for w in program.weights}
    if program.output_boundaries and any(writes_into_value(op) for op in program.ops):
        compiled = False  # a single region would give zero gradients to weights that have none
    if compiled:
        program = use_patch_embed(program)
        program = pad_groups(program) if device.type == "cuda" else program
        program, added = fuse_wgrad(program, sums)
        attributes |= added
    values = {v.name: v for v in program.values}
    waits = with_views(waits, program)

    emit_region = partial(emit_module, held={}, device=device, axes=dict(axes), class_name="Region")  # can be pickled

    def compile_region(region: Segment, recompute: bool = False) -> nn.Module:
        return compiled_region(region, values, attributes, emit_region, device, recompute, program.shapes_differ, ahead)

    size, bounds = len(program.ops), program.segments
    first, end = (bounds[0], bounds[-1]) if bounds else (size, size)
    if compiled and bounds:
        bounds = tuple(sorted({*bounds, *(border for border in program.output_boundaries if first < border < end)}))
    segments = cut_segments(program.ops, pairwise(bounds), attributes, program.results, "segment")
    if compiled:
        before, after = region_spans(program, 0, first), region_spans(program, end, size)
        regions = cut_segments(program.ops, (*before, *after), attributes, program.results, "region")
        modules = {s.name: compile_region(s, True) for s in segments} | {r.name: compile_region(r) for r in regions}
        steps: Sequence[Op | Segment] = (*regions[: len(before)], *segments, *regions[len(before) :])
    else:
        modules = {
            s.name: CheckpointedSegment(
                emit_module(s.ops, s.reads, s.makes, attributes, device, axes, "Segment", waits_at_start(waits, s)),
                [attributes[name] for name in s.mutates],
                s.is_random,
            )
            for s in segments
        }
        steps = (*program.ops[:first], *segments, *program.ops[end:])
    held = attributes | modules
    return emit_module(steps, program.arguments, program.results, held, device, axes, f"Stage{program.stage}", waits)


def with_views(waits: WaitLookup, program: Program) -> WaitLookup:
    """The waits, also for values of the program that are views of weights."""
    viewed = views_of_weights(program.ops, {weight.name for weight in program.weights})
    return lambda names: waits([viewed.get(name, name) for name in names])


def waits_at_start(waits: WaitLookup, segment: Segment) -> WaitLookup:
    """Waits for all weights of a segment before the first operation that reads one.

    The second run of the segment is part of a backward, which then reads all of them.
    """
    ready = waits([name for op in segment.ops for name in op.reads])
    return lambda names: ready if waits(names) is not None else None


def region_spans(program: Program, start: int, end: int) -> list[tuple[int, int]]:
    """First and end of each compiled region among a program's operations from ``start`` to before ``end``."""
    borders = [border - start for border in program.output_boundaries if start <= border < end]
    return list(pairwise((*(start + at for at in region_starts(program.ops[start:end], borders)), end)))


def emit_module(
    steps: Sequence[Op | Segment],
    arguments: Sequence[str],
    results: Sequence[str],
    held: Mapping[str, Any],
    device: torch.device,
    axes: Mapping[str, str],
    class_name: str,
    waits: WaitLookup = no_waits,
) -> fx.GraphModule:
    """A module that takes arguments, runs operations and segments, and returns a tuple of results, all by name.

    Args:
        held: weights and the segments' modules by name; those that are used become attributes of the module.
        waits: as in `graph_module`.
    """
    segments = [step for step in steps if isinstance(step, Segment)]
    kept = {*results, *(name for s in segments for name in s.reads)}
    ops = {op.name: op for op in fuse_async_tp([step for step in steps if isinstance(step, Op)], kept)}
    read = {name for op in ops.values() for name in op.reads} | {*results} | {s.name for s in segments}
    attributes = {name: value for name, value in held.items() if name in read}
    graph = fx.Graph()
    made = [name for op in ops.values() for name in (op.name, *(v.name for v in op.outputs))]
    made += [name for s in segments for name in (s.name, *s.makes)]
    names = identifiers([*arguments, *attributes, *made])
    nodes: dict[str, fx.Node] = {name: graph.placeholder(names[name]) for name in arguments}
    for name in [name for name in attributes if name not in {s.name for s in segments}]:
        nodes[name] = graph.create_node("get_attr", name, name=names[name])
    called: list[Callable[[], None]] = []

    def wait(reads: Iterable[str]) -> None:
        ready = waits([*reads])
        if ready is not None and called[-1:] != [ready]:
            name = f"wait_{len(called)}"
            called.append(ready)
            attributes[name] = Wait(ready)
            graph.call_module(name)

    for step in steps:
        if isinstance(step, Segment):
            wait(name for op in step.ops for name in op.reads)
            call_segment(graph, step, nodes, names)
        elif step.name in ops:  # otherwise fused with a later operation
            wait(ops[step.name].reads)
            emit_op(graph, ops[step.name], nodes, names, device, axes)
    wait(results)
    graph.output(tuple(nodes[name] for name in results))
    return fx.GraphModule(attributes, graph, class_name=class_name)


class Wait(nn.Module):
    """Waits until weights have been gathered."""

    def __init__(self, ready: Callable[[], None]) -> None:
        super().__init__()
        self.ready = ready

    def forward(self) -> None:
        self.ready()


def emit_op(
    graph: fx.Graph,
    op: Op,
    nodes: dict[str, fx.Node],
    names: Mapping[str, str],
    device: torch.device,
    axes: Mapping[str, str],
) -> None:
    """Append one operation's node to ``graph``, and a node for each output if it has several."""
    collective = op.target.startswith("autopar.")

    def localised(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return nodes[argument.name]
        if isinstance(argument, LocalDevice):
            return device
        if collective and isinstance(argument, str):
            return axes.get(argument, argument)
        if isinstance(argument, tuple):
            return [localised(a) for a in argument]
        return argument

    args = tuple(localised(a) for a in op.args)
    kwargs = {k: localised(v) for k, v in op.kwargs}
    node = graph.create_node("call_function", operator(op.target), args, kwargs, name=names[op.name])
    if op.outputs and op.outputs[0].name == op.name:
        nodes[op.name] = node
        return
    for value in op.outputs:
        index = int(value.name.rpartition(":")[2])
        nodes[value.name] = graph.create_node("call_function", getitem, (node, index), name=names[value.name])


def identifiers(names: Iterable[str]) -> Mapping[str, str]:
    """A Python identifier for each value, with a number if two would be equal."""
    result: dict[str, str] = {}
    taken: set[str] = set(RESERVED)
    for name in dict.fromkeys(names):
        result[name] = unused_name(identifier(name), taken)
        taken.add(result[name])
    return result


def identifier(name: str) -> str:
    """A Python identifier for a value, such as ``blocks_0_attn_qkv_linear``."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain


def source(program: Program) -> str:
    """The program as readable Python; comments on top list its parameters, inputs, and values received and sent."""
    meta = {w.name: torch.empty(w.shape, dtype=getattr(torch, w.dtype), device="meta") for w in program.weights}
    module = graph_module(program, meta, torch.device("cpu"))
    params = sum(w.numel for w in program.weights if w.kind == "parameter")
    lines = [f"# stage {program.stage}, {program.mode}, microbatch of {program.batch}: {len(program.ops)} operations, "
             f"{params:,} parameters in {sum(w.kind == 'parameter' for w in program.weights)} tensors"]  # fmt: skip
    lines += [f"# input   {v.name}: {v.dtype}{list(v.shape)}" for v in program.inputs]
    lines += [f"# from stage {e.src}: {e.value.name}: {e.value.dtype}{list(e.value.shape)}" for e in program.receives]
    lines += [f"# to stage {e.dst}: {e.value.name}: {e.value.dtype}{list(e.value.shape)}" for e in program.sends]
    segments = segments_of(program)
    if segments:
        is_part = program.segments[-1] < len(program.ops)
        count = plural(len(segments), "segment")
        if is_part:
            count = "first segment" if len(segments) == 1 else f"first {count}"
        rest = ", and what later operations save" if is_part else ""
        lines.append(f"# kept for the backward is what enters its {count}, which run again{rest}")
    bodies = [line for segment in segments for line in segment_source(segment, module)]
    return "\n".join([*lines, module.code.strip(), *bodies])
