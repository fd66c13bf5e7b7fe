"""Lowering: from a model to the graph that is priced, split and run. `lower_model` lists every rewrite in order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Mode
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import Precision
from autopar.ir.pytree import unflatten
from autopar.ir.status import doing
from autopar.trace.call import Call, is_batched
from autopar.trace.export import without_advice
from autopar.trace.passes import bf16_params
from autopar.trace.passes.bf16_params import cast_leaf, with_low_params, with_masters
from autopar.trace.passes.layouts import channels_last_images, contiguous_borders
from autopar.trace.passes.precision import apply_precision, low_param_dtype
from autopar.trace.passes.random_ops import use_counter_rng
from autopar.trace.shared_memory import check_shared_memory
from autopar.trace.trace import trace


def lower_model(
    model: nn.Module, call: Call, mode: Mode, name: str, precision: Precision | None = None, channels_last: bool = False
) -> Graph:
    """The graph of a model called with a microbatch in one mode: its trace, after every rewrite in this order.

    1. `trace`: torch.export and the conversion into an `ir.graph.Graph`. It makes in-place operations out of place,
       writes autocast regions of the model as casts, and drops trivial attention masks.
    2. `with_masters` (``bf16-params``): parameters become bfloat16 compute copies of FP32 masters.
    3. `apply_precision` (``bf16``, ``fp16``): casts, where `torch.autocast` would insert them.
    4. `use_counter_rng`: random operations become functions of counters. After casts, since a random mask has the
       dtype of the tensor that it is drawn for, which casts change.
    5. `channels_last_images`, if that is asked for: images are copied to channels last for convolutions.
    6. `contiguous_borders`: values that compiled regions hand on are copied once where their layout is transposed.

    Args:
        call: the call at the microbatch size.
        precision: precision to compute in; by default the model's.
        channels_last: whether convolutions that suit it compute in channels last.

    Raises:
        TraceError: the model cannot be traced, or its weights share memory.
        UsageError: it cannot compute in this precision.
    """
    doing(f"tracing {name}")
    low = low_param_dtype(precision)
    traced, traced_call = (model, call) if low is None else in_low_dtype(model, call, low)
    try:
        graph = trace(traced, traced_call.args, traced_call.kwargs, mode, name)
    except TraceError as error:
        problem = without_advice(str(error))
        if low is None or "dtype" not in problem or problem == str(error):
            raise
        raise TraceError(problem + bf16_params.ADVICE) from error
    check_shared_memory(model, graph)
    if low is not None:
        graph = with_masters(graph, {n: p.dtype for n, p in model.named_parameters()}, call.leaves)
    graph = apply_precision(graph, precision)
    graph = use_counter_rng(graph, lambda: trace_at_batch(traced, traced_call, 2 * call.batch, mode))
    return contiguous_borders(channels_last_images(graph) if channels_last else graph)


def lower_planned(plan: Plan, model: nn.Module, microbatch: Call, mode: Mode) -> Graph:
    """The graph of a model under a plan, in one mode. Raises as `lower_model`."""
    return lower_model(model, microbatch, mode, plan.model.name, plan.precision, plan.channels_last)


def in_low_dtype(model: nn.Module, call: Call, low: torch.dtype) -> tuple[nn.Module, Call]:
    """The model with low-precision parameters, and its call with low-precision inputs."""
    leaves = [cast_leaf(leaf, low) for leaf in call.leaves]
    return with_low_params(model, low), Call(*unflatten(leaves, call.spec))


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
        problem = without_advice(str(error))
        if not uneven or problem == str(error):
            raise
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise TraceError(
            f"{problem}The likely cause: the inputs begin with different sizes ({shapes}). "
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
