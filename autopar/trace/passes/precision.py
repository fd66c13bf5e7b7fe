"""Precision of a model: the one its parameters have, and the one it is asked to compute in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from autopar.errors import UsageError
from autopar.ir.graph import Graph
from autopar.ir.plan_parts import Precision
from autopar.trace.passes.autocast import apply_autocast

PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
LOW_DTYPE: Mapping[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "bf16-params": "bfloat16"}


def model_precision(graph: Graph) -> Precision:
    """The precision in which most of the model's parameters are stored."""
    numel = Counter({"float32": 0})
    for weight in graph.weights:
        numel[weight.stored_dtype] += weight.numel if weight.kind == "parameter" and weight.dtype in PRECISIONS else 0
    return PRECISIONS[numel.most_common(1)[0][0]]


def mixed_dtype(graph: Graph, precision: Precision) -> str | None:
    """The low dtype of mixed precision; None if the precision is not mixed or the parameters are not float32."""
    return LOW_DTYPE.get(precision) if model_precision(graph) == "fp32" else None


def low_param_dtype(precision: Precision | None) -> torch.dtype | None:
    """The dtype of the parameters' compute copies under a precision; None if parameters keep their dtype."""
    return torch.bfloat16 if precision == "bf16-params" else None


def apply_precision(graph: Graph, wanted: Precision | None) -> Graph:
    """The traced graph in the wanted precision: rewritten if it differs from the model's.

    Raises:
        UsageError: the model's parameters are not float32, so that mixed precision is impossible.
    """
    own = model_precision(graph)
    if wanted in (None, own):
        return graph
    low = mixed_dtype(graph, wanted)
    if low is None:
        raise UsageError(
            f"precision={wanted!r}, but the parameters of {graph.model} are {own}. Mixed precision keeps "
            "float32 parameters and computes in copies of them; other parameters are computed with as they are. "
            f"Convert the model with .float(), or leave precision out to run in {own}."
        )
    return graph if low_param_dtype(wanted) else apply_autocast(graph, low)
