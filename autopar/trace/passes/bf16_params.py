"""Low-precision parameters: a model as it computes with bfloat16 copies of its float32 parameters, on such inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
KEEPS_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def params_to_lower(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, by their first name, that a model computes with copies of: float32 ones but those of batch norm.

    These stay as they are, beside statistics that are averages over many steps, which a low precision loses.
    """
    kept = {id(p) for m in model.modules() if isinstance(m, KEEPS_STATISTICS) for p in m.parameters(recurse=False)}
    return {n: p for n, p in model.named_parameters() if p.dtype == torch.float32 and id(p) not in kept}


def with_low_params(model: nn.Module, low: torch.dtype) -> nn.Module:
    """A copy of a model, to be traced, whose float32 parameters are low, without values.

    Buffers stay as they are, as under FSDP2's ``MixedPrecisionPolicy(param_dtype=…)``.
    """
    copies: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, dtype=low), p.requires_grad) for p in params_to_lower(model).values()
    }
    return copy_model(model, copies)


def cast_leaf(leaf: Any, low: torch.dtype) -> Any:
    """A float32 tensor in the low precision; anything else as it is."""
    return leaf.to(low) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf


def with_masters(graph: Graph, stored: Mapping[str, torch.dtype], leaves: Sequence[Any]) -> Graph:
    """The trace of a model with low parameters and inputs, made to hold float32 ones.

    Its parameters become copies of masters, and casts of its inputs its first operations.

    Args:
        stored: the dtypes of the model's own parameters and buffers.
        leaves: of the call, as they will be given.
    """
    weights = []
    for weight in graph.weights:
        dtype = dtype_name(stored[weight.name]) if weight.kind == "parameter" else weight.dtype
        weights.append(replace(weight, master=dtype if dtype != weight.dtype else ""))
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


def check_dtypes(graph: Graph) -> None:
    """Refuse a model that mixes its low parameters with tensors that stayed as they are.

    Raises:
        UsageError: names the first operation that cannot.
    """
    dtypes = {name: value.dtype for name, value in graph.values.items()}
    dtypes |= {weight.name: weight.dtype for weight in graph.weights}
    for op in graph.ops:
        if op.target.startswith("aten.") and op.target.split(".")[1] in OF_ONE_DTYPE:
            given = {name: dtypes[name] for name in op.reads if "float" in dtypes[name]}
            if len({*given.values()}) > 1:
                listed = ", ".join(f"{name} is {dtype}" for name, dtype in given.items())
                raise UsageError(
                    f"{op.name} cannot compute with operands of several dtypes: {listed}. With "
                    'precision="bf16-params" parameters and inputs are bfloat16; buffers, and what the model makes '
                    "float32 by itself, stay as they are. Cast those in the model, as in buffer.to(x.dtype), or use "
                    'precision="bf16".'
                )
