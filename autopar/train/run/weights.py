"""Weights in safetensors files, with the names of the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from autopar.api.state_dict import with_versions
from autopar.ir.files import replacing


def save_weights(state: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a state dict; a tied weight is written under each of its names, since the format has no aliases.

    A file that is there is replaced once the new one is on disk.
    """
    copies = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    with replacing(path) as file:
        save_file(copies, file, dict(metadata) if metadata is not None else None)


def exported_updates(path: Path) -> int | None:
    """Updates after which a file's weights were exported, from its metadata; None if there is no such file."""
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        updates = (file.metadata() or {}).get("updates")
        return int(updates) if updates is not None else None
    return None


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load the weights of a file into a model and return it in eval mode; all names must match."""
    model.load_state_dict(with_versions(load_file(path), model.state_dict()))
    return model.eval()
