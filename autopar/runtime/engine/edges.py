"""Tensors between the chunks of a pipeline: their indices, gradient edges, memory orders and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.graph import Value
from autopar.ir.placement import Placement
from autopar.ir.program import Edge, Program, input_names


def channel_index(src: int, dst: int, placement: Placement) -> int:
    """Index of two chunks among the chunk pairs of their ranks; messages are in order per chunk pair only."""
    return src // placement.pp * placement.chunks + dst // placement.pp


def input_indices(programs: Sequence[Program]) -> list[list[int]]:
    """Indices of each program's inputs among a rank's inputs for a microbatch."""
    names = input_names(programs)
    return [[names.index(value.name) for value in program.inputs] for program in programs]


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Gradient edge of a tensor; None for a tensor without a graph."""
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """Permutation that undoes ``order``."""
    return [order.index(d) for d in range(len(order))]


def edge_check(edge: Edge, prefix: str = "") -> Callable[[torch.Tensor], None]:
    """Function that asserts the dtype and shape of a tensor before it travels over an edge.

    The receiver has allocated what the edge says. Gloo would deliver a message of another length without an error.

    Args:
        prefix: stands before the value's name in the message.
    """
    value, dtype = edge.value, getattr(torch, edge.value.dtype)
    shape = torch.Size(value.shape)

    def check(tensor: torch.Tensor) -> None:
        assert tensor.dtype == dtype and tensor.shape == shape, (
            f"between stages {edge.src} and {edge.dst}, {prefix}{value.name} is {tensor.dtype} {list(tensor.shape)}, "
            f"but {dtype} {list(shape)} in the program"
        )

    return check


def distinct_values(edges: Sequence[Edge]) -> list[Value]:
    """Values that travel over the edges, each once, in order."""
    return list({e.value.name: e.value for e in edges}.values())
