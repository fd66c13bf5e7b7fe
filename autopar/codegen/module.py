"""From a program to a runnable, printable ``fx.GraphModule``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ir import LocalDevice, Op, Program, Ref
from autopar.operators import operator

# What the code of an fx.GraphModule means by these names an argument must not hide.
RESERVED = ("self", "torch", "device", "inf", "nan")
SAME_KEYS: Mapping[str, str] = MappingProxyType({})


def graph_module(
    program: Program,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    axes: Mapping[str, str] = SAME_KEYS,
) -> fx.GraphModule:
    """A module that computes one stage: takes ``program.arguments``, returns a tuple of ``program.results``.

    Args:
        weights: at least the program's own, by name; used as they are, so several modules can share them.
        device: replaces every device that tracing baked in.
        axes: for each mesh axis the key of its communicator in `autopar.collectives`; its name where it is not listed.
    """
    own = {w.name: weights[w.name] for w in program.weights}
    graph = fx.Graph()
    made = (name for op in program.ops for name in (op.name, *(v.name for v in op.outputs)))
    names = identifiers([*program.arguments, *own, *made])
    nodes: dict[str, fx.Node] = {name: graph.placeholder(names[name]) for name in program.arguments}
    for name in own:
        nodes[name] = graph.create_node("get_attr", name, name=names[name])
    for op in program.ops:
        emit(graph, op, nodes, names, device, axes)
    graph.output(tuple(nodes[name] for name in program.results))
    return fx.GraphModule(own, graph, class_name=f"Stage{program.stage}")


def emit(
    graph: fx.Graph,
    op: Op,
    nodes: dict[str, fx.Node],
    names: Mapping[str, str],
    device: torch.device,
    axes: Mapping[str, str],
) -> None:
    """Append one operation's node, and a node per output where it has several."""
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
    """A Python name for each value, numbered where two would be equal."""
    result: dict[str, str] = {}
    taken: set[str] = set(RESERVED)
    for name in dict.fromkeys(names):
        plain = unique = identifier(name)
        count = 0
        while unique in taken:
            count += 1
            unique = f"{plain}_{count}"
        taken.add(unique)
        result[name] = unique
    return result


def identifier(name: str) -> str:
    """A Python name for a value: ``blocks_0_attn_qkv_linear``."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain


def source(program: Program) -> str:
    """The program as readable Python, with what it holds, receives and sends on top."""
    meta = {w.name: torch.empty(w.shape, dtype=getattr(torch, w.dtype), device="meta") for w in program.weights}
    code = graph_module(program, meta, torch.device("cpu")).code.strip()
    params = sum(w.numel for w in program.weights if w.kind == "parameter")
    lines = [f"# stage {program.stage}, {program.mode}, microbatch of {program.batch}: {len(program.ops)} operations, "
             f"{params:,} parameters in {sum(w.kind == 'parameter' for w in program.weights)} tensors"]  # fmt: skip
    lines += [f"# input   {v.name}: {v.dtype}{list(v.shape)}" for v in program.inputs]
    lines += [f"# from stage {e.src}: {e.value.name}: {e.value.dtype}{list(e.value.shape)}" for e in program.receives]
    lines += [f"# to stage {e.dst}: {e.value.name}: {e.value.dtype}{list(e.value.shape)}" for e in program.sends]
    return "\n".join([*lines, code])
