"""A training loop of a user's, which runs on one device and, prepared, on ranks: what it shows, to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.api.prepare import PreparedModule, PreparedOptimizer

Batch = tuple[torch.Tensor, torch.Tensor]
Weights = dict[str, torch.Tensor]
PART = slice(None)  # the whole batch


def batches(number: int, size: int = 8) -> list[Batch]:
    """Batches of random images [size, 3, 32, 32] and labels [size]; the same ones at each call."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 32, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator))
        for _ in range(number)
    ]


def grouped_sgd(model: nn.Module) -> Optimizer:
    """SGD with a group for vectors, which has no weight decay and another rate."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)


@dataclass
class Shown:
    """What a loop shows: losses of all batches, norms of updates' gradients, gradients of the first update."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Weights = field(default_factory=dict)


def run(model: nn.Module, optimizer: Optimizer, data: Sequence[Batch], part: slice = PART) -> Shown:
    """Train: two batches for an update, two forwards for a backward, clipped, with a schedule of momentum too.

    Args:
        part: samples of each batch that this process feeds.
    """
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=8)
    shown = Shown()
    for number, (x, y) in enumerate(data):
        first, second = model(x[part]), model(x[part].flip(-1))
        loss = F.cross_entropy(first, y[part], label_smoothing=0.1) + 0.1 * (first - second).square().mean()
        (loss / 2).backward()
        shown.losses.append(loss.item())
        if number % 2:
            shown.gradients = shown.gradients or gradients(model)
            shown.norms.append(clip(model))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return shown


def gradients(model: nn.Module) -> Weights:
    if isinstance(model, PreparedModule):
        return model.pm.gradients()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def clip(model: nn.Module) -> float:
    norm = model.clip_grad_norm_ if isinstance(model, PreparedModule) else None
    return (norm(1.0) if norm else nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()


def on_ranks(
    model: nn.Module, make: Callable[[nn.Module], Optimizer], devices: int, **options: Any
) -> tuple[PreparedModule, PreparedOptimizer]:
    """A copy of a model on ranks."""
    own = copy.deepcopy(model)
    return autopar.prepare(own, make(own), devices, **({"cost": "analytic"} | options))


def assert_same(own: Weights, expected: Weights, atol: float = 1e-5) -> None:
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-4, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_state(own: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the state dicts of two optimizers."""
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert_same(own["state"][number], values)
