"""Code generation: from a program to a runnable, printable ``fx.GraphModule``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from autopar.codegen.compile import compiled_region
from autopar.codegen.fusions.async_tp import fuse_async_tp
from autopar.codegen.fusions.patch_embed import use_patch_embed
from autopar.codegen.fusions.wgrad import MainGradLookup, fuse_wgrad, no_main_grads
from autopar.ir.graph import LocalDevice, Op, Ref
from autopar.ir.names import unused_name
from autopar.ir.program import Program
from autopar.ops.regions import region_starts, writes_into_value
from autopar.ops.registry import operator

# Names that the code of an fx.GraphModule uses; arguments must not shadow them.
RESERVED = ("self", "torch", "device", "inf", "nan")
SAME_KEYS: Mapping[str, str] = MappingProxyType({})
NO_MODULES: Mapping[str, nn.Module] = MappingProxyType({})
NO_WAITS: Mapping[str, Callable[[], None]] = MappingProxyType({})


def graph_module(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    axes: Mapping[str, str] = SAME_KEYS,
    waits: Mapping[str, Callable[[], None]] = NO_WAITS,
    sums: MainGradLookup = no_main_grads,
    compiled: bool = False,
) -> fx.GraphModule:
    """A module that computes one stage: takes ``program.arguments``, returns a tuple of ``program.results``.

    If the stage recomputes, each checkpointed segment is a submodule.

    Args:
        weights: at least the program's weights, by name; not copied, so that several modules can share them.
        device: replaces every device in the trace.
        axes: for each mesh axis the key of its communicator in `autopar.ops.collectives`; by default the axis's name.
        waits: for each weight that may still be gathered (ZeRO prefetch), a function that waits for it. Several
            weights can share one. It is called before the first operation, region or segment that reads one of them.
        sums: returns the key of a weight's main gradient, into which its compiled linear layer accumulates, or None.
        compiled: compile the operations with torch.compile, region by region, at the first call.
    """
    attributes: dict[str, Any] = {w.name: weights[w.name] for w in program.weights}
    if program.output_boundaries and any(writes_into_value(op) for op in program.ops):
        compiled = False  # a single region would give zero gradients to weights that have none
    if compiled:
        program = use_patch_embed(program)
        program, added = fuse_wgrad(program, sums)
        attributes |= added
    values = {v.name: v for v in program.values}

    def emit_region(ops: Sequence[Op], arguments: Sequence[str], results: Sequence[str]) -> fx.GraphModule:
        return emit_module(ops, arguments, results, {}, device, axes, "Region")

    def body(
        ops: Sequence[Op],
        arguments: Sequence[str],
        results: Sequence[str],
        name: str,
        modules: Mapping[str, nn.Module] = NO_MODULES,
        segments: Sequence[Segment] = (),
        waits: Mapping[str, Callable[[], None]] = NO_WAITS,
    ) -> fx.GraphModule:
        if not compiled:
            return emit_module(ops, arguments, results, attributes | dict(modules), device, axes, name, segments, waits)
        wanted = {*results, *(read for s in segments for read in s.reads)}
        borders = [border for border in program.output_boundaries if border < len(ops)]
        regions = cut_segments(ops, region_starts(ops, borders), attributes, wanted, "region")
        calls = {region.name: compiled_region(region, values, attributes, emit_region) for region in regions}
        held = attributes | dict(modules) | calls
        return emit_module((), arguments, results, held, device, axes, name, (*regions, *segments), waits)

    starts = program.segments
    if compiled and starts:
        starts = tuple(sorted({*starts, *(border for border in program.output_boundaries if border > starts[0])}))
    segments = cut_segments(program.ops, starts, attributes, program.results, "segment")
    modules = {}
    for s in segments:
        if compiled:
            modules[s.name] = compiled_region(s, values, attributes, emit_region, recompute=True)
        else:
            modules[s.name] = CheckpointedSegment(
                body(s.ops, s.reads, s.makes, "Segment"), [attributes[n] for n in s.mutates], s.is_random
            )
    once = program.ops[: starts[0]] if segments else program.ops
    return body(once, program.arguments, program.results, f"Stage{program.stage}", modules, segments, waits)


def emit_module(
    ops: Sequence[Op],
    arguments: Sequence[str],
    results: Sequence[str],
    held: Mapping[str, Any],
    device: torch.device,
    axes: Mapping[str, str],
    class_name: str,
    segments: Sequence[Segment] = (),
    waits: Mapping[str, Callable[[], None]] = NO_WAITS,
) -> fx.GraphModule:
    """A module that takes arguments, runs operations and then segments, and returns a tuple of results, all by name.

    Args:
        held: weights and the segments' modules by name; those that are used become attributes of the module.
        waits: as in `graph_module`.
    """
    ops = fuse_async_tp(ops, {*results, *(name for s in segments for name in s.reads)})
    read = {name for op in ops for name in op.reads} | {*results} | {s.name for s in segments}
    attributes = {name: value for name, value in held.items() if name in read}
    graph = fx.Graph()
    made = [name for op in ops for name in (op.name, *(v.name for v in op.outputs))]
    made += [name for s in segments for name in (s.name, *s.makes)]
    names = identifiers([*arguments, *attributes, *made])
    nodes: dict[str, fx.Node] = {name: graph.placeholder(names[name]) for name in arguments}
    for name in [name for name in attributes if name not in {s.name for s in segments}]:
        nodes[name] = graph.create_node("get_attr", name, name=names[name])
    waiting: dict[Callable[[], None], str] = {}

    def wait(reads: Iterable[str]) -> None:
        for ready in dict.fromkeys(waits[name] for name in reads if name in waits):
            if ready not in waiting:
                waiting[ready] = f"wait_{len(waiting)}"
                attributes[waiting[ready]] = Wait(ready)
                graph.call_module(waiting[ready])

    for op in ops:
        wait(op.reads)
        emit_op(graph, op, nodes, names, device, axes)
    for segment in segments:
        wait(name for op in segment.ops for name in op.reads)
        call_segment(graph, segment, nodes, names)
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
    if program.segments:
        lines.append(f"# kept for the backward is what enters its {len(program.segments)} segments, which run again")
    bodies = [line for segment in segments_of(program) for line in segment_source(segment, module)]
    return "\n".join([*lines, module.code.strip(), *bodies])
