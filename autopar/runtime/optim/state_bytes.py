"""Bytes of an optimizer's state per parameter, measured by updating small parameters: no list of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.ir.graph import Graph, Weight
from autopar.ir.pytree import leaves
from autopar.runtime.optim.build import made
from autopar.runtime.optim.probe import needs_closure, nested, probe_context, small_weight, step_probe
from autopar.runtime.spec import Parameters

STEPS = 2  # some optimizers allocate more state after their first step


def with_optimizer(graph: Graph, make: Callable[[Parameters], Optimizer]) -> Graph:
    """Training graph with the ``state_bytes`` of its weights; raises as `state_bytes`."""
    kept = state_bytes(make, [weight for weight in graph.weights if weight.requires_grad])
    return replace(graph, weights=tuple(replace(w, state_bytes=kept.get(w.name, w.state_bytes)) for w in graph.weights))


def state_bytes(make: Callable[[Parameters], Optimizer], weights: Sequence[Weight]) -> Mapping[str, float]:
    """Bytes of state per element that an optimizer keeps of each weight, by name.

    Counters of one element are left out.

    Args:
        make: the user's callable.
        weights: all trainable weights, with their whole shapes.
    Raises:
        UsageError: the optimizer cannot be built, or fails on small parameters of these kinds.
    Error: dims are cut to 64. State that grows with a parameter's rows and columns instead of its elements (Adafactor)
        is therefore too large, but still small.
    """
    with probe_context(torch.device("cpu")):
        small = {w.name: nn.Parameter(torch.randn_like(small_weight(w))) for w in weights}
        optimizer = made(make, small)
        if needs_closure(optimizer):
            return {}  # the ranks refuse the optimizer and give the reason
        for _ in range(STEPS):
            for parameter in small.values():
                parameter.grad = torch.randn_like(parameter)
            step_probe(optimizer, f"{len(small)} small parameters")
    kept = {name: kept_bytes(optimizer, parameter) for name, parameter in small.items()}
    return {name: kept[name] / parameter.numel() for name, parameter in small.items() if parameter.numel()}


def kept_bytes(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    """Bytes of a parameter's state in the optimizer and in all optimizers that it wraps."""
    tensors = {
        id(leaf): leaf
        for own in nested(optimizer)
        for leaf in leaves(dict(own.state.get(parameter, {})))
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0
    }
    return sum(tensor.nbytes for tensor in tensors.values())
