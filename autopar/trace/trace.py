"""The trace: an unmodified model and example inputs become an `ir.graph.Graph` of ATen operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Mode, Op, Ref, Value, Weight, dtype_name, refs
from autopar.ir.names import unused_name
from autopar.trace.convert import Converter, value_of
from autopar.trace.export import ADVICE, export
from autopar.trace.fake import without_claim
from autopar.trace.hooks import check_hooks
from autopar.trace.masks import drop_trivial_masks
from autopar.trace.python_state import check_constants

__all__ = ["ADVICE", "check_hooks", "trace", "weight_tensors"]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode = "train",
    name: str = "",
) -> Graph:
    """The graph of ``model(*args, **kwargs)`` in one mode; the model itself is left untouched.

    Args:
        model: on any device, the meta device included; parameters and buffers keep their names.
        args: positional inputs at the microbatch shape; nested structures of tensors and constants.
        kwargs: keyword inputs likewise.
        mode: "train" keeps submodules that a training model has in eval mode, so that frozen ones stay frozen.
        name: name of the model in messages; by default its class name.

    Raises:
        TraceError: torch.export refuses the model, or its graph holds something that cannot be split.
    """
    program = export(model, tuple(args), dict(kwargs or {}), mode)
    constants = {k: without_claim(v) for k, v in program.constants.items() if isinstance(v, torch.Tensor)}
    placeholders = classify_placeholders(program, model)
    weights = placeholders.weights
    converter = Converter(placeholders.values, set(weights))
    outputs = converter.run(program.graph)
    ops = live_ops(drop_trivial_masks(converter.final_ops()), outputs)
    kept = {op.name for op in ops}
    used = {r for op in ops for r in op.reads} | set(refs(outputs))
    groups = (tuple(n for n in names if n in kept) for names in converter.colocated())
    graph = Graph(
        model=name or type(model).__name__,
        mode=mode,
        batch=next((v.shape[0] for v in placeholders.inputs if v.shape), 1),
        inputs=placeholders.inputs,
        weights=tuple(w for w in weights.values() if w.kind != "constant" or w.name in used),
        ops=ops,
        outputs=outputs if isinstance(outputs, tuple) else (outputs,),
        leaves=placeholders.leaves,
        in_spec=program.call_spec.in_spec,
        out_spec=program.call_spec.out_spec,
        colocated=tuple(g for g in groups if len(g) > 1),
        constants={k: constants[k] for k in weights if k in constants and weights[k].kind == "constant"},
    )
    check_constants(graph)
    return graph


@dataclass(frozen=True)
class Placeholders:
    """The placeholders of an exported program, by what they are.

    Args:
        inputs: the tensors among the call's arguments.
        leaves: the flattened arguments of the call, as in `Graph.leaves`.
        weights: parameters, buffers and constants by name.
        values: the value of each placeholder that is an input or a weight.
    """

    inputs: tuple[Value, ...]
    leaves: tuple[Any, ...]
    weights: Mapping[str, Weight]
    values: Mapping[fx.Node, Value]


def classify_placeholders(program: torch.export.ExportedProgram, model: nn.Module) -> Placeholders:
    """The inputs, constants and weights among the placeholders of an exported program.

    Raises:
        TraceError: a placeholder of the model is not a tensor.
    """
    names_of = aliases(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    inputs: list[Value] = []
    leaves: list[Any] = []
    weights: dict[str, Weight] = {}
    values: dict[fx.Node, Value] = {}
    nodes = program.graph.find_nodes(op="placeholder")
    specs = program.graph_signature.input_specs
    targets = {names_of.get(spec.target, (spec.target,))[0] for spec in specs if spec.target is not None}
    for node, spec in zip(nodes, specs, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            leaves.append(spec.arg.value)
        elif spec.kind is InputKind.USER_INPUT:
            # A parameter may have the name of an argument of forward.
            taken = targets | {n.name for n in nodes if n is not node}
            values[node] = value_of(unused_name(node.name, taken), node.meta["val"])
            inputs.append(values[node])
            leaves.append(Ref(values[node].name))
        elif spec.target is not None and isinstance(node.meta.get("val"), torch.Tensor):
            weight = weight_of(spec.kind, spec.target, node.meta["val"], names_of, model)
            weights[weight.name] = replace(weight, requires_grad=weight.name in trainable)
            values[node] = replace(value_of(weight.name, node.meta["val"]), requires_grad=weight.name in trainable)
        else:
            raise TraceError(
                f"Cannot use {spec.kind.name.lower()} {spec.target} of {type(model).__name__}: not a tensor."
            )
    return Placeholders(tuple(inputs), tuple(leaves), weights, values)


def weight_tensors(model: nn.Module, graph: Graph) -> dict[str, torch.Tensor]:
    """The model's tensors of ``graph.weights``, by canonical name; not copies."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    return {w.name: graph.constants[w.name] if w.kind == "constant" else own[w.name] for w in graph.weights}


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of the same tensor, in the model's order, for each name of a parameter or buffer."""
    by_tensor: dict[int, list[str]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_tensor[id(tensor)]) for name, tensor in named}


def weight_of(
    kind: InputKind, target: str, val: torch.Tensor, names_of: Mapping[str, tuple[str, ...]], model: nn.Module
) -> Weight:
    """The weight of a placeholder, under the first of its names."""
    dtype, order = dtype_name(val.dtype), value_of(target, val).memory_order
    order = () if order == tuple(range(val.ndim)) else order
    if kind is InputKind.CONSTANT_TENSOR or target not in names_of:
        return Weight(target, "constant", tuple(val.shape), dtype, order=order)
    names = names_of[target]
    if kind is InputKind.PARAMETER:
        return Weight(names[0], "parameter", tuple(val.shape), dtype, names=names, order=order)
    saved = tuple(n for n in names if is_persistent(model, n))
    return Weight(names[0], "buffer", tuple(val.shape), dtype, names=saved, order=order)


def is_persistent(model: nn.Module, name: str) -> bool:
    """Whether a buffer is part of the state dict. torch has no public way to ask; the set is stable since 1.6."""
    owner, _, attribute = name.rpartition(".")
    return attribute not in model.get_submodule(owner)._non_persistent_buffers_set


def live_ops(ops: list[Op], outputs: Any) -> tuple[Op, ...]:
    """The operations that an output or an update depends on, in order."""
    needed = set(refs(outputs))
    updated = {name for op in ops if not op.outputs for name in refs(op.args)}
    kept: list[Op] = []
    for op in reversed(ops):
        if (
            not op.outputs
            or op.mutates
            or needed & {v.name for v in op.outputs}
            or updated & {v.name for v in op.outputs}
        ):
            kept.append(op)
            needed |= set(op.reads)
    return tuple(reversed(kept))
