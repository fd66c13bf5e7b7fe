"""Which precision a model can compute in, and on which devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from autopar.errors import UsageError
from autopar.ir.graph import Graph
from autopar.ir.plan_parts import Precision
from autopar.trace.passes.autocast import autocast

PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
LOW: Mapping[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "bf16-params": "bfloat16"}


def own_precision(graph: Graph) -> Precision:
    """The precision that most of the model's parameters are stored in."""
    numel = Counter({"float32": 0})
    for weight in graph.weights:
        numel[weight.stored_dtype] += weight.numel if weight.kind == "parameter" and weight.dtype in PRECISIONS else 0
    return PRECISIONS[numel.most_common(1)[0][0]]


def mixed_dtype(graph: Graph, precision: Precision) -> str | None:
    """The low dtype that a model with float32 weights computes in; None where it computes in their own precision."""
    return LOW.get(precision) if own_precision(graph) == "fp32" else None


def low_params(precision: Precision | None) -> torch.dtype | None:
    """The dtype that parameters have while a model computes in a precision; None where they keep their own."""
    return torch.bfloat16 if precision == "bf16-params" else None


def in_precision(graph: Graph, wanted: Precision | None) -> Graph:
    """The traced graph, rewritten to compute in another precision than the model's own if that is wanted.

    Raises:
        UsageError: the model's parameters do not allow it.
    """
    own = own_precision(graph)
    if wanted in (None, own):
        return graph
    low = mixed_dtype(graph, wanted)
    if low is None:
        raise UsageError(
            f"precision={wanted!r}, but the parameters of {graph.model} are {own}. Mixed precision keeps "
            "float32 parameters and computes in copies of them; other parameters are computed with as they are. "
            f"Convert the model with .float(), or leave precision out to run in {own}."
        )
    return graph if low_params(wanted) else autocast(graph, low)
