"""Models of `support.models` with a loss and batches of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.models import ConvNet, SharedModule, Tied, TwoInputs, UNet, Updating, tiny_vit

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


def two_input_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["class"], target) + output["early"].square().mean() + output["features"].mean()


def unet(batch: int) -> tuple[Any, Any]:
    return torch.randn(batch, 3, 8, 8), torch.rand(batch, 1, 8, 8)


def tied(batch: int) -> tuple[Any, Any]:
    return torch.randint(0, 32, (batch, 5)), torch.randint(0, 32, (batch,))


def two_inputs(batch: int) -> tuple[Any, Any]:
    return {"image": torch.randn(batch, 3, 8, 8), "text": torch.randn(batch, 6)}, torch.randint(0, 5, (batch,))


def vectors(batch: int) -> tuple[Any, Any]:
    return torch.randn(batch, 8), torch.randint(0, 4, (batch,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, Any]], Any]] = {
    "unet": (UNet, unet, F.mse_loss),
    "tied": (Tied, tied, F.cross_entropy),
    "two inputs": (TwoInputs, two_inputs, two_input_loss),
    "updating": (Updating, vectors, F.cross_entropy),
    "shared": (SharedModule, vectors, F.cross_entropy),
}


def data(name: str, batch: int) -> tuple[Any, Any]:
    """Inputs and targets for the model with this name."""
    if name == "normed":
        return torch.randn(batch, 8, 3), torch.randint(0, 4, (batch,))
    return {"tied": tied, "unet": unet}.get(name, vectors)(batch)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "vit": (lambda: tiny_vit(2), lambda: torch.randn(8, 3, 32, 32), 10),
    "convolutions": (ConvNet, lambda: torch.randn(8, 3, 8, 8), 4),
    "tied": (Tied, lambda: torch.randint(0, 32, (8, 6)), 32),
    "in place": (Updating, lambda: torch.randn(8, 8), 4),
}
