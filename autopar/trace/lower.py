"""From a model to the graph that is priced, split and run: the trace, and every rewrite of it in order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Mode
from autopar.ir.plan_parts import Precision
from autopar.ir.pytree import unflatten
from autopar.trace.call import Call, is_batched
from autopar.trace.export import ADVICE
from autopar.trace.passes.bf16_params import cast_leaf, check_dtypes, with_low_params, with_masters
from autopar.trace.passes.counter_rng import use_counter_rng
from autopar.trace.passes.precision import apply_precision, low_param_dtype
from autopar.trace.trace import trace


def lower_model(model: nn.Module, call: Call, mode: Mode, name: str, precision: Precision | None = None) -> Graph:
    """The graph of a model called with a microbatch in one mode.

    Args:
        precision: to compute in; the model's own if None.

    Raises:
        TraceError: the model cannot be traced.
        UsageError: it cannot compute in this precision.
    """
    low = low_param_dtype(precision)
    if low is None:
        graph = trace(model, call.args, call.kwargs, mode, name)
    else:
        stored, given = {n: p.dtype for n, p in model.named_parameters()}, call.leaves
        model = with_low_params(model, low)
        call = Call(*unflatten([cast_leaf(leaf, low) for leaf in given], call.spec))
        graph = trace(model, call.args, call.kwargs, mode, name)
        check_dtypes(graph)
        graph = with_masters(graph, stored, given)
    graph = apply_precision(graph, precision)
    # After the casts: what is drawn for a tensor then has its dtype.
    return use_counter_rng(graph, lambda: trace_at_batch(model, call, 2 * call.batch, mode))


@contextmanager
def explain_uneven_inputs(model: nn.Module, call: Call) -> Iterator[None]:
    """Within ``with``, a TraceError of torch.export also names the inputs' first sizes if these differ.

    A model may take such inputs: those that do not begin with the batch go whole to each microbatch. But if the trace
    fails, they are the likely cause.

    Args:
        call: the call at the global batch.
    Raises:
        TraceError: the error from within, with the shapes.
    """
    try:
        yield
    except TraceError as error:
        given = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
        tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and v.ndim}
        uneven = len(tensors) == len(given) and len({len(v) for v in tensors.values()}) > 1
        if not uneven or not str(error).endswith(ADVICE):
            raise
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise TraceError(
            f"{str(error).removesuffix(ADVICE)}The likely cause: the inputs begin with different sizes ({shapes}). "
            f"Only those that begin with the batch, {call.batch}, are cut into microbatches; if others hold samples "
            "too, give them the same first size."
        ) from error


def trace_at_batch(model: nn.Module, call: Call, batch: int, mode: Mode) -> Graph | None:
    """The trace at another batch size; None if the model cannot be traced there."""

    def resized(leaf: Any) -> Any:
        if not is_batched(leaf, call.batch):
            return leaf
        return torch.empty((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    args, kwargs = unflatten([resized(leaf) for leaf in call.leaves], call.spec)
    try:
        return trace(model, args, kwargs, mode)
    except TraceError:
        return None
