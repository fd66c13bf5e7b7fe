"""The user's loss function under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LossFunction = Callable[[Any, Any], torch.Tensor]


def in_autocast(loss_fn: LossFunction, device: torch.device, dtype: torch.dtype) -> LossFunction:
    """``loss_fn`` in an autocast region. The loss is at least float32, so that multiplying it by a scale is finite."""

    def loss_in_autocast(output: Any, target: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype):
            loss = loss_fn(output, target)
        low = isinstance(loss, torch.Tensor) and loss.dtype in (torch.float16, torch.bfloat16)
        return loss.float() if low else loss

    return loss_in_autocast
