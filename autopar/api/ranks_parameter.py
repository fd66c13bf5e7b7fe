"""Stand-ins for parameters whose values are on ranks, for a loop that counts, groups or names parameters."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from torch import nn

from autopar.api.model import ParallelModel
from autopar.errors import UsageError

ON_RANKS = (
    "The weights and gradients are on the ranks, in parts. module.state_dict() returns the weights, "
    "module.pm.gradients() the gradients; module.clip_grad_norm_(…) clips; give the optimizer to autopar.prepare to "
    "update them"
)
BEFORE = "change the model before autopar.prepare"


class RanksParameter(nn.Parameter):
    """Stand-in for a parameter whose values are on the ranks: its name, shape, dtype and device.

    What computes a tensor from it raises a UsageError.
    """

    pm: ParallelModel

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name == "requires_grad_" or (name == "__set__" and owner is torch.Tensor.requires_grad):
            raise UsageError(f"requires_grad is set too late: {BEFORE}.")
        if name.endswith("_hook") or (name.endswith("_") and not name.endswith("__")):  # also in-place operations
            raise UsageError(f"{ON_RANKS}.")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            raise UsageError(f"{ON_RANKS}.")
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RanksParameter({list(self.shape)}, {self.dtype})"

    @property
    def grad(self) -> None:  # type: ignore[override]
        """None; a UsageError once the ranks have gradients."""
        if self.pm.has_gradients:
            raise UsageError(f"{ON_RANKS}.")

    @grad.setter
    def grad(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raises a UsageError: optimizer.zero_grad() drops gradients."""
        raise UsageError(f"{ON_RANKS}; optimizer.zero_grad() drops gradients.")


def stand_in(parameter: nn.Parameter, pm: ParallelModel) -> RanksParameter:
    """Stand-in for a parameter of the model that the ranks of ``pm`` run."""
    value = nan if parameter.is_floating_point() or parameter.is_complex() else 0
    filled = torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    own = RanksParameter(filled, parameter.requires_grad)
    own.pm = pm
    return own
