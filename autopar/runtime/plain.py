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
    scaler: torch.amp.GradScaler,
    autocast: torch.dtype | None = None,
) -> float:
    """Time of one plain training step with gradient accumulation over the microbatches.

    Args:
        scaler: enabled for float16.
        autocast: the low dtype of mixed precision.
    """
    samples = sum(len(y) for _, y in microbatches)
    device = next(model.parameters()).device
    start = time.perf_counter()
    for x, y in microbatches:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = loss_fn(model(x), y) * (len(y) / samples)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
