"""The training loop that everybody writes by hand: what plans are measured against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def plain_step_seconds(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> float:
    """Time of one plain training step with gradient accumulation over the microbatches."""
    samples = sum(len(y) for _, y in microbatches)
    device = next(model.parameters()).device
    start = time.perf_counter()
    for x, y in microbatches:
        loss = loss_fn(model(x), y) * (len(y) / samples)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
