"""Two views of each sample, and a contrastive loss over the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoTowers(nn.Module):
    """Embeddings of two views, a trained scale that has no samples, and a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, one: Tensor, other: Tensor) -> dict[str, Any]:
        h, g = torch.tanh(self.first(one)), torch.tanh(self.first(other))
        scale = self.scale.exp()
        return {"one": self.second(h), "other": self.second(g), "scale": scale, "spread": h.square().mean(), "dim": 4}


def contrastive(output: dict[str, Any], target: tuple[Tensor, Tensor, float]) -> Tensor:
    """Cross-entropy of each sample against all others of the batch, over the positives alone."""
    positive, temperature, weight = target
    logits = output["scale"] * output["one"] @ output["other"].T / temperature
    losses = F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")
    return (losses * positive).sum() / positive.sum() + weight * output["spread"] / output["dim"]


def batch(size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, float]]:
    return (torch.randn(size, 6), torch.randn(size, 6)), (torch.rand(size) < 0.6, torch.tensor(0.5), 0.1)


def on_one_device(model: nn.Module, batches: list[Any], share: float = 1.0) -> tuple[list[float], nn.Module]:
    model, losses = copy.deepcopy(model), []
    for x, y in batches:
        loss = contrastive(model(*x), y)
        (loss * share).backward()
        losses.append(loss.item())
    return losses, model
