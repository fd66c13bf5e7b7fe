"""Traces that are kept: most of what a small model takes under one mesh is being traced again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph, Mode
from autopar.ir.pytree import leaves
from autopar.trace.trace import trace


@contextmanager
def traced_once() -> Iterator[None]:
    """Within ``with`` all models are the same, which is traced once in each mode and for each shape of its inputs."""
    known: dict[str, Graph] = {}

    def kept(model: nn.Module, args: Any, kwargs: Mapping[str, Any], mode: Mode, name: str = "") -> Graph:
        shapes = [leaf.shape for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        key = f"{name} {mode} {shapes}"
        if key not in known:
            known[key] = trace(model, args, kwargs, mode, name)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.trace.lower.trace", kept)
        yield
