"""The reference: the unmodified model on one device, with gradient accumulation over the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def chunks(tree: Any, count: int, cut_tensor: Any = torch.chunk) -> list[Any]:
    """Tree of each microbatch, every tensor [batch, ...] cut as torch.chunk does."""
    leaves, spec = pytree.tree_flatten(tree)
    cut = [cut_tensor(leaf, count) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    count = len(next(c for c in cut if c is not None))
    return [
        pytree.tree_unflatten([c[i] if c is not None else leaf for c, leaf in zip(cut, leaves)], spec)
        for i in range(count)
    ]


def samples(tree: Any) -> int:
    return next(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)).shape[0]


@dataclass
class Reference:
    """Deep copy of a model, trained by a plain PyTorch loop.

    It computes all replicas one after the other, each with its own buffers. Those of the first replica stay in the
    model and are evaluated.

    Attributes:
        buffers: buffers of the other replicas, by replica.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor] = torch.nn.functional.cross_entropy
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    optimizer: torch.optim.Optimizer = field(init=False)
    buffers: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def forward(self, x: Any, microbatches: int, replicas: int = 1) -> list[torch.Tensor]:
        outputs = []
        with torch.no_grad():
            for replica, parts in enumerate(self.replica_parts(x, microbatches, replicas)):
                with self.as_replica(replica, replicas):
                    outputs += [pytree.tree_leaves(call(self.model, part)) for part in parts]
        return [torch.cat(column) for column in zip(*outputs)]

    def forward_backward(self, x: Any, y: Any, microbatches: int, replicas: int = 1) -> float:
        total = 0.0
        both = self.replica_parts((x, y), microbatches, replicas)
        for replica, parts in enumerate(both):
            with self.as_replica(replica, replicas):
                for part, target in parts:
                    loss = self.loss_fn(call(self.model, part), target) * (samples(part) / samples(x))
                    loss.backward()
                    total += loss.item()
        return total

    def replica_parts(self, tree: Any, microbatches: int, replicas: int) -> list[list[Any]]:
        return [chunks(part, microbatches) for part in chunks(tree, replicas, torch.tensor_split)]

    @contextmanager
    def as_replica(self, number: int, replicas: int) -> Iterator[None]:
        """Give the model a replica's buffers; evaluation starts from those of the first replica."""
        buffers = list(self.model.buffers())
        first = [buffer.clone() for buffer in buffers]
        if number == 0 and (not self.model.training or not self.buffers):
            self.buffers = dict.fromkeys(range(1, replicas), first)
        for buffer, kept in zip(buffers, self.buffers[number] if number else first, strict=True):
            buffer.data.copy_(kept)
        yield
        if number:
            self.buffers[number] = [buffer.clone() for buffer in buffers]
            for buffer, kept in zip(buffers, first, strict=True):
                buffer.data.copy_(kept)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check equality within 1e-5 + 1e-4·|expected|, exact for integers."""
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


def replica_part(tensor: torch.Tensor, pm: Any) -> torch.Tensor:
    """Part of a batch that this process feeds to a model under torchrun, [batch / data_size, ...]."""
    return tensor.chunk(pm.data_size)[pm.data_rank]


def unwrapped_state(reference: Reference) -> dict[str, torch.Tensor]:
    """State dict of the model inside `support.models.Autocast`."""
    return {name.removeprefix("model."): t for name, t in reference.model.state_dict().items()}
