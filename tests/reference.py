"""The judge: the unmodified model on one device, doing the same microbatches with gradient accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

ABSOLUTE, RELATIVE = 1e-5, 1e-4


def call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def chunks(tree: Any, microbatches: int) -> list[Any]:
    """The tree for each microbatch, every tensor cut as torch.chunk does."""
    leaves, spec = pytree.tree_flatten(tree)
    cut = [leaf.chunk(microbatches) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    count = len(next(c for c in cut if c is not None))
    return [
        pytree.tree_unflatten([c[i] if c is not None else leaf for c, leaf in zip(cut, leaves)], spec)
        for i in range(count)
    ]


def samples(tree: Any) -> int:
    return next(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)).shape[0]


@dataclass
class Reference:
    """A deep copy of a model, trained plainly."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor] = torch.nn.functional.cross_entropy
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def forward(self, x: Any, microbatches: int) -> list[torch.Tensor]:
        with torch.no_grad():
            outputs = [pytree.tree_leaves(call(self.model, part)) for part in chunks(x, microbatches)]
        return [torch.cat(column) for column in zip(*outputs)]

    def forward_backward(self, x: Any, y: Any, microbatches: int) -> float:
        total = 0.0
        for part, target in zip(chunks(x, microbatches), chunks(y, microbatches), strict=True):
            loss = self.loss_fn(call(self.model, part), target) * (samples(part) / samples(x))
            loss.backward()
            total += loss.item()
        return total

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal within 1e-5 + 1e-4·|expected|; integers exactly."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, f"{what}: {actual.shape} {actual.dtype}"
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{what}: {actual} instead of {expected}"
        return
    excess = (actual - expected).abs() - (ABSOLUTE + RELATIVE * expected.abs())
    assert excess.max().item() <= 0, f"{what}: off by {(actual - expected).abs().max().item():.3e}"


def assert_all_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert list(actual) == list(expected), f"{what}: names {set(actual) ^ set(expected)}"
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, f"{what} of {name}")
