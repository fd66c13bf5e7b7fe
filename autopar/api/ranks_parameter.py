"""Stand-ins for parameters whose values are on ranks, for a loop that counts, groups or names parameters.

Parameters of the unmodified model get no gradients, and ranks do not see changes of ``requires_grad``. So reading the
one and setting the other is an error too: clipping or unfreezing would do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from math import nan
from typing import Any

import torch
from torch import nn

from autopar.api.model import ParallelModel
from autopar.api.program_cache import ProgramCache
from autopar.errors import UsageError

ON_RANKS = (
    "The weights and gradients are on the ranks, in parts. module.state_dict() returns the weights, "
    "module.pm.gradients() the gradients; module.clip_grad_norm_(…) clips; give the optimizer to autopar.prepare to "
    "update them"
)
BEFORE = "change the model before autopar.prepare"
TOO_LATE = f"requires_grad is set too late: {BEFORE}."
GRAD: Any = torch.Tensor.grad  # the descriptor
REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class RanksParameter(nn.Parameter):
    """Stand-in for a parameter whose values are on the ranks: its name, shape, dtype and device.

    What computes a tensor from it raises a UsageError.
    """

    pm: ParallelModel

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name == "requires_grad_" or (name == "__set__" and owner is torch.Tensor.requires_grad):
            raise UsageError(TOO_LATE)
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


def refuse_changes(parameters: Iterable[nn.Parameter], pm: ParallelModel) -> None:
    """Have changes of ``requires_grad`` raise a UsageError while ``pm`` is open, and reads of ``grad`` while its ranks
    have gradients.

    Subclasses of `torch.nn.Parameter` stay as they are.
    """
    reference = weakref.ref(pm)

    def running() -> ParallelModel | None:
        """The model, if its ranks run and it is not traced: torch.export reads gradients."""
        pm = reference()
        return pm if pm is not None and pm.is_open and not ProgramCache.is_tracing else None

    class UnmodifiedParameter(nn.Parameter):
        """Parameter of the model that the ranks of ``pm`` run."""

        @property
        def grad(self) -> torch.Tensor | None:  # type: ignore[override]
            pm = running()
            if pm is not None and pm.has_gradients:
                raise UsageError(f"This parameter is the unmodified model's. {ON_RANKS}.")
            if pm is None and not ProgramCache.is_tracing:
                # The ranks have ended, and torch has faster optimizers for this class.
                self.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]
            return GRAD.__get__(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            GRAD.__set__(self, value)

        @property
        def requires_grad(self) -> bool:
            return REQUIRES_GRAD.__get__(self)

        @requires_grad.setter
        def requires_grad(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            if running() is not None and value != self.requires_grad:
                raise UsageError(TOO_LATE)
            REQUIRES_GRAD.__set__(self, value)

        def requires_grad_(self, requires_grad: bool = True) -> UnmodifiedParameter:
            self.requires_grad = requires_grad
            return self

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            memo[id(self)] = copy = nn.Parameter(self.detach().clone(), self.requires_grad)
            return copy

    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = UnmodifiedParameter
