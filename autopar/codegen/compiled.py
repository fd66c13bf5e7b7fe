"""Regions under torch.compile: those that differ in names alone, such as the blocks of a transformer, share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.codegen.segments import Segment
from autopar.ir import Op, Value
from autopar.ir.graph import renamed

Emit = Callable[[Sequence[Op], Sequence[str], Sequence[str]], fx.GraphModule]

# What has been compiled in this process, by code and arguments: stages, modes and, as their code names the axes,
# models without tensor parallelism can share it.
COMPILED: dict[str, Callable[..., Any]] = {}


class CompiledRegion(nn.Module):
    """Calls what a region was compiled to, with the weights that it has here."""

    def __init__(self, call: Callable[..., Any], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.call, self.weights = call, list(weights)  # a list: the module that holds the region owns them

    def forward(self, *args: Tensor) -> Any:
        return self.call(*self.weights, *args)


def checkpointed(body: fx.GraphModule, draws: bool) -> fx.GraphModule:
    """Keeps for the backward what enters ``body``, which the compiled backward runs again.

    It has code of its own: torch.compile counts how often one code was compiled, and gives up.
    """
    graph = fx.Graph()
    arguments = [graph.placeholder(node.name) for node in body.graph.find_nodes(op="placeholder")]
    inner = graph.create_node("get_attr", "body")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    graph.output(graph.call_function(checkpoint, (inner, *arguments), options))
    return fx.GraphModule({"body": body}, graph, class_name="Checkpointed")


def compiled_region(
    region: Segment,
    values: Mapping[str, Value],
    weights: Mapping[str, Tensor],
    emit: Emit,
    recompute: bool = False,
) -> CompiledRegion:
    """A region that torch.compile makes kernels of at its first call, unless an equal one has been compiled.

    Equal are operations, constants, and the shapes, dtypes and strides of what is read. Blocks that draw random numbers
    differ: each draws its own.

    Args:
        values: what operations read that are not weights.
        emit: makes a module of operations, arguments and results.
        recompute: keep for the backward what enters the region alone.
    """
    own = tuple(dict.fromkeys(name for op in region.ops for name in op.reads if name in weights))
    names = numbered("w", own) | numbered("x", region.reads)
    ops = []
    for number, op in enumerate(region.ops):
        name = f"v{number}"
        names |= {v.name: v.name.replace(op.name, name, 1) for v in op.outputs}
        outputs = tuple(replace(v, name=names[v.name]) for v in op.outputs)
        kwargs = tuple((key, renamed(value, names)) for key, value in op.kwargs)
        ops.append(replace(op, name=name, args=renamed(op.args, names), kwargs=kwargs, outputs=outputs))
    module = emit(ops, [names[n] for n in (*own, *region.reads)], [names[n] for n in region.makes])
    held = [weights[name] for name in own]
    taken = [(tuple(w.shape), w.dtype, w.stride(), w.requires_grad) for w in held]
    taken += [(v.shape, v.dtype, v.stride, v.requires_grad) for v in (values[name] for name in region.reads)]
    key = f"{module.code}\n{taken}\n{recompute}"
    if key not in COMPILED:
        whole = checkpointed(module, region.draws) if recompute else module
        COMPILED[key] = torch.compile(whole, fullgraph=True, dynamic=False)
    return CompiledRegion(COMPILED[key], held)


def numbered(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """``w0``, ``w1``, … for each name."""
    return {name: f"{prefix}{k}" for k, name in enumerate(names)}
