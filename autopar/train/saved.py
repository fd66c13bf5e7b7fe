"""Weights on disk, in the names of the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def save_weights(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a state dict; tied weights are written under each of their names."""
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, path)


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """The model with the weights of a file, in eval mode; all names must match."""
    model.load_state_dict(load_file(path))
    return model.eval()
