"""Low-precision parameters: the trace of a model that computes with bfloat16 copies of its float32 parameters.

``precision="bf16-params"`` also casts float32 inputs to bfloat16, as FSDP2's ``MixedPrecisionPolicy`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.ir.graph import Graph, Op, Ref, dtype_name, renamed
from autopar.ir.names import unused_name
from autopar.trace.copy_model import copy_model

CAST = "aten.to.dtype"
# Operations of aten whose operands must have one dtype.
OF_ONE_DTYPE = {
    "linear", "bilinear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "layer_norm", "group_norm",
}  # fmt: skip
# Why a model fails with low parameters, and what helps.
ADVICE = (
    'With precision="bf16-params" parameters and inputs are bfloat16; buffers, and what the model makes float32 by '
    'itself, stay as they are. Cast those in the model, as in buffer.to(x.dtype), or use precision="bf16".'
)
KEEPS_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def params_to_lower(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get a low-precision compute copy, by their first name: float32, not in a batch norm.

    Batch norm keeps float32 like its running statistics: averages over many steps lose their updates in bfloat16.
    """
    kept = {id(p) for m in model.modules() if isinstance(m, KEEPS_STATISTICS) for p in m.parameters(recurse=False)}
    return {n: p for n, p in model.named_parameters() if p.dtype == torch.float32 and id(p) not in kept}


def with_low_params(model: nn.Module, low: torch.dtype) -> nn.Module:
    """A copy of a model for tracing, whose parameters have the low dtype; their values are undefined.

    Buffers keep their dtype, as under FSDP2's ``MixedPrecisionPolicy(param_dtype=…)``.
    """
    copies: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, dtype=low), p.requires_grad) for p in params_to_lower(model).values()
    }
    return copy_model(model, copies)


def cast_leaf(leaf: Any, low: torch.dtype) -> Any:
    """A float32 tensor cast to the low dtype; any other input unchanged."""
    return leaf.to(low) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf


def with_masters(graph: Graph, stored: Mapping[str, torch.dtype], leaves: Sequence[Any]) -> Graph:
    """The trace of a model with low parameters, with FP32 masters and float32 inputs instead.

    The parameters become compute copies of masters. Casts of the inputs become the first operations.

    Args:
        graph: trace of the model with low parameters and inputs.
        stored: dtypes of the model's parameters before they were lowered.
        leaves: inputs of the call in the dtypes that users pass.
    Raises:
        UsageError: an operation mixes low parameters with tensors that kept float32, or updates a low parameter.
    """
    check_dtypes(graph)
    weights = []
    for weight in graph.weights:
        dtype = dtype_name(stored[weight.name]) if weight.kind == "parameter" else weight.dtype
        weights.append(replace(weight, master=dtype if dtype != weight.dtype else ""))
    check_updates(graph, {weight.name for weight in weights if weight.master})
    given = {leaf.name: dtype_name(tensor.dtype) for leaf, tensor in zip(graph.leaves, leaves) if isinstance(leaf, Ref)}
    taken = {*graph.readable, *(op.name for op in graph.ops)}
    names = {name: name for name in graph.readable}
    casts: list[Op] = []
    for value in graph.inputs:
        if given[value.name] != value.dtype:
            name = unused_name(f"{value.name}.{value.dtype}", taken)
            cast = replace(value, name=name)
            casts.append(Op(name, CAST, (Ref(value.name), getattr(torch, value.dtype)), (), (cast,), ""))
            names[value.name] = name
    ops = [op.reading({name: names[name] for name in op.reads}) for op in graph.ops]
    return replace(
        graph,
        inputs=tuple(replace(value, dtype=given[value.name]) for value in graph.inputs),
        weights=tuple(weights),
        ops=(*casts, *ops),
        outputs=renamed(graph.outputs, names),
    )


def check_updates(graph: Graph, copied: Set[str]) -> None:
    """Refuse a forward that updates compute copies: the masters, which the next step copies, would stay as they are.

    Raises:
        UsageError: names the first parameter and the line.
    """
    for op in graph.ops:
        for name in copied & {*op.mutates}:
            raise UsageError(
                f"The forward of {graph.model} updates {name}{f' at {op.source}' if op.source else ''}. "
                'precision="bf16-params" computes with a bfloat16 copy of it, and the update would be lost. '
                'Use precision="bf16".'
            )


def check_dtypes(graph: Graph) -> None:
    """Refuse a model that mixes its low parameters with tensors that kept float32.

    Raises:
        UsageError: names the first operation whose operands have different dtypes.
    """
    dtypes = {name: value.dtype for name, value in graph.values.items()}
    dtypes |= {weight.name: weight.dtype for weight in graph.weights}
    for op in graph.ops:
        if op.target.startswith("aten.") and op.target.split(".")[1] in OF_ONE_DTYPE:
            given = {name: dtypes[name] for name in op.reads if "float" in dtypes[name]}
            if len({*given.values()}) > 1:
                listed = ", ".join(f"{name} is {dtype}" for name, dtype in given.items())
                raise UsageError(f"{op.name} cannot compute with operands of several dtypes: {listed}. {ADVICE}")
