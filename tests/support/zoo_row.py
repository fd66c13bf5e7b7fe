"""A row of the zoo matrix: a small model of one family, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ZooRow:
    """A family of models.

    Args:
        source: "timm", "torchvision", "Hugging Face" or "diffusers".
        family: name of the family in its library.
        name: name that a user writes: ``torchvision:resnet18``, or the class.
        build: a small version with random weights, made without a download.
        inputs: positional and keyword arguments for so many samples; all are of one kind.
        dropping: the small version with dropout; by default it has its family's.
        planned: the model that is planned on the meta device, and its inputs for so many samples; by default the
            small version.
        loss: loss of the outputs of the whole batch and a target that is ignored; by default a loss of any output.
        part: part of the model that is split, if it is not the whole; empty otherwise.
        blocked: reason that the model itself cannot be traced, and its remedy; empty otherwise.
    """

    source: str
    family: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    dropping: Callable[[], nn.Module] | None = None
    planned: Callable[[int], tuple[nn.Module, Inputs]] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    part: str = ""
    blocked: str = ""

    @property
    def key(self) -> str:
        return f"{self.source}/{self.family}"


def images(side: int) -> Callable[[int], Inputs]:
    """Inputs of a model that takes images [batch, 3, side, side]."""
    return lambda batch: ((torch.randn(batch, 3, side, side),), {})


def clips(frames: int, side: int) -> Callable[[int], Inputs]:
    """Inputs of a model that takes clips [batch, 3, frames, side, side]."""
    return lambda batch: ((torch.randn(batch, 3, frames, side, side),), {})


def pixels(side: int) -> Callable[[int], Inputs]:
    """As `images`, but as the keyword argument of Hugging Face's models."""
    return lambda batch: ((), {"pixel_values": torch.randn(batch, 3, side, side)})
