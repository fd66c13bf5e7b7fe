"""Deep copies of models, with some objects replaced."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def copy_model(model: nn.Module, replaced: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model.

    A tensor that a module computes before each forward and stores (``torch.nn.utils.weight_norm``) is detached in the
    copy; deepcopy refuses tensors with autograd history.

    Args:
        replaced: objects to use in the copy, by the id of the original that each replaces.
    """
    memo = dict(replaced or {})
    for module in model.modules():
        made = (value for value in vars(module).values() if isinstance(value, Tensor) and value.grad_fn is not None)
        memo |= {id(value): value.detach().clone() for value in made}
    return copy.deepcopy(model, memo)
