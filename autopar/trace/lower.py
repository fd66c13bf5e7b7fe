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
from autopar.trace.passes.bf16_params import check_dtypes, lowered_leaf, with_low_params, with_masters
from autopar.trace.passes.counter_rng import counter_based
from autopar.trace.passes.precision import in_precision, low_params
from autopar.trace.trace import trace


def lowered(model: nn.Module, call: Call, mode: Mode, name: str, precision: Precision | None = None) -> Graph:
    """The graph of a model called with a microbatch in one mode.

    Args:
        precision: to compute in; the model's own if None.

    Raises:
        TraceError: the model cannot be traced.
        UsageError: it cannot compute in this precision.
    """
    low = low_params(precision)
    if low is None:
        graph = trace(model, call.args, call.kwargs, mode, name)
    else:
        stored, given = {n: p.dtype for n, p in model.named_parameters()}, call.leaves
        model = with_low_params(model, low)
        call = Call(*unflatten([lowered_leaf(leaf, low) for leaf in given], call.spec))
        graph = trace(model, call.args, call.kwargs, mode, name)
        check_dtypes(graph)
        graph = with_masters(graph, stored, given)
    graph = in_precision(graph, precision)
    # After the casts: what is drawn for a tensor then has its dtype.
    return counter_based(graph, lambda: trace_at(model, call, 2 * call.batch, mode))


@contextmanager
def uneven_inputs_explained(model: nn.Module, call: Call) -> Iterator[None]:
    """Within ``with``, a model that torch.export refuses on tensors that begin with different sizes is told so.

    A model may take such inputs (what does not begin with the batch goes whole to each microbatch); but one that fails
    on them likely fails because of them.

    Args:
        call: at the global batch.
    Raises:
        TraceError: the one from within, and the sizes.
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


def trace_at(model: nn.Module, call: Call, batch: int, mode: Mode) -> Graph | None:
    """The trace at another batch size; None for a model that takes no other."""

    def resized(leaf: Any) -> Any:
        if not is_batched(leaf, call.batch):
            return leaf
        return torch.empty((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    args, kwargs = unflatten([resized(leaf) for leaf in call.leaves], call.spec)
    try:
        return trace(model, args, kwargs, mode)
    except TraceError:
        return None
