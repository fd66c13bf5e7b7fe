"""Copies of models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def copy_model(model: nn.Module, replaced: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy.

    What a module computes before each forward and keeps (``torch.nn.utils.weight_norm``) becomes a plain tensor in it;
    deepcopy would refuse it.

    Args:
        replaced: what stands in the copy for objects, by their id.
    """
    memo = dict(replaced or {})
    for module in model.modules():
        made = (value for value in vars(module).values() if isinstance(value, Tensor) and value.grad_fn is not None)
        memo |= {id(value): value.detach().clone() for value in made}
    return copy.deepcopy(model, memo)
