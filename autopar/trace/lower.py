"""Lowering: from a model to the graph that is priced, split and run. `lower_model` lists every rewrite in order.

Weights that share memory without being one tensor are refused: ranks would train them separately.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Mode
from autopar.ir.plan_parts import Precision
from autopar.ir.pytree import unflatten
from autopar.trace.call import Call, is_batched
from autopar.trace.export import ADVICE
from autopar.trace.passes.bf16_params import cast_leaf, with_low_params, with_masters
from autopar.trace.passes.precision import apply_precision, low_param_dtype
from autopar.trace.passes.random_ops import use_counter_rng
from autopar.trace.trace import trace


def lower_model(model: nn.Module, call: Call, mode: Mode, name: str, precision: Precision | None = None) -> Graph:
    """The graph of a model called with a microbatch in one mode: its trace, after every rewrite in this order.

    1. `trace`: torch.export and the conversion into an `ir.graph.Graph`. It makes in-place operations out of place,
       writes autocast regions of the model as casts, and drops trivial attention masks.
    2. `with_masters` (``bf16-params``): parameters become bfloat16 compute copies of FP32 masters.
    3. `apply_precision` (``bf16``, ``fp16``): casts, where `torch.autocast` would insert them.
    4. `use_counter_rng`: random operations become functions of counters. Last, since a random mask has the dtype of the
       tensor that it is drawn for, which casts change.

    Args:
        call: the call at the microbatch size.
        precision: precision to compute in; by default the model's.

    Raises:
        TraceError: the model cannot be traced, or its weights share memory.
        UsageError: it cannot compute in this precision.
    """
    low = low_param_dtype(precision)
    traced, traced_call = (model, call) if low is None else in_low_dtype(model, call, low)
    graph = trace(traced, traced_call.args, traced_call.kwargs, mode, name)
    check_shared_memory(model, graph)
    if low is not None:
        graph = with_masters(graph, {n: p.dtype for n, p in model.named_parameters()}, call.leaves)
    graph = apply_precision(graph, precision)
    return use_counter_rng(graph, lambda: trace_at_batch(traced, traced_call, 2 * call.batch, mode))


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


def check_shared_memory(model: nn.Module, graph: Graph) -> None:
    """Refuse trainable parameters that overlap in memory with another parameter, buffer or constant.

    One tensor under several names is allowed, and so are parts of one storage that do not overlap.

    Args:
        graph: the model's trace, for its constants.

    Raises:
        TraceError: names both tensors.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | constants(model, graph)
    tensors = {id(tensor): (name, tensor) for name, tensor in named.items() if has_memory(tensor)}
    active: list[tuple[str, Tensor]] = []  # those that may reach beyond the current address
    for name, tensor in sorted(tensors.values(), key=lambda item: item[1].data_ptr()):
        active = [item for item in active if end(item[1]) > tensor.data_ptr()]
        for other_name, other in active:
            if (tensor.requires_grad or other.requires_grad) and overlap(other, tensor):
                one, two = (other_name, name) if other.requires_grad else (name, other_name)
                raise TraceError(
                    f"Cannot trace {type(model).__name__}: {one} {list(named[one].shape)} and {two} "
                    f"{list(named[two].shape)} share memory but are different tensors. Devices train copies of the "
                    f"weights, in which an update of {one} would not reach {two}. Use one tensor under both names, or "
                    f"leave {two} out and compute it in the forward from {one}; clone() it if it shall not follow."
                )
        active.append((name, tensor))


def constants(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Constants of a graph by name; plain attributes of the model are read from it, since a trace may copy a model."""
    found = dict(graph.constants)
    for name in found:
        try:
            value = operator.attrgetter(name)(model)
        except AttributeError:
            continue  # made in the forward
        if isinstance(value, Tensor):
            found[name] = value
    return found


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has elements in memory; not so on the meta device."""
    strided = type(tensor.data) is Tensor and tensor.layout is torch.strided
    return strided and not tensor.is_meta and tensor.numel() > 0 and tensor.data_ptr() != 0


def end(tensor: Tensor) -> int:
    """The address after a tensor's last element."""
    return tensor.data_ptr() + (last_index(tensor) + 1) * tensor.element_size()


def last_index(tensor: Tensor) -> int:
    """Distance from a tensor's first element to its last in memory, in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors share an element, given that the second begins within the first one's range."""
    distance, rest = divmod(two.data_ptr() - one.data_ptr(), one.element_size())
    if rest or one.element_size() != two.element_size():
        return True
    used = torch.zeros(max(last_index(one), distance + last_index(two)) + 1, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride()).fill_(True)
    return bool(used.as_strided(two.shape, two.stride(), distance).any())
