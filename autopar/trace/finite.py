"""Branches on whether activations are finite: traced as if all were.

Detection transformers guard their layers in training: ``if not torch.isfinite(x).all(): x = torch.clamp(x, …)``. A
trace has no values, so torch.export refuses such a branch. Which way a healthy run takes it is known, though.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.errors import AssumedFiniteWarning, caller_level
from autopar.ir.units import plural
from autopar.trace.hooks import user_line

# Name of a function, and its result where all values are finite.
CHECKS = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
KEEPING = {"all", "any"}
NEGATING = {"logical_not", "bitwise_not", "__invert__"}
READING = {"__bool__", "item"}


class FiniteBranches(TorchFunctionMode):
    """Within ``with``, reading whether activations are finite says that they are; ``lines`` has the lines that read it.

    Only tensors that require grad count as activations: a mask may well have infinite values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.answers: dict[int, tuple[torch.Tensor, bool]] = {}  # by identity of the tensor, which is kept for it

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        known = self.answers.get(id(args[0])) if args else None
        if known is not None and name in READING:
            self.lines.append(user_line())
            return known[1]
        result = func(*args, **(kwargs or {}))
        answer = None
        if name in CHECKS and args[0].requires_grad:
            answer = CHECKS[name]
        elif known is not None and name in KEEPING | NEGATING:
            answer = known[1] == (name in KEEPING)
        if answer is not None and isinstance(result, torch.Tensor):
            self.answers[id(result)] = result, answer
        return result


def warn_of_finite_branches(name: str, lines: Sequence[str]) -> None:
    """Warn of branches that were traced as if all activations were finite.

    Args:
        name: name of the model.
        lines: text on each line of the user's that branches, as often as it did.
    """
    places = list(dict.fromkeys(lines))
    if places:
        more = f" and {plural(len(places) - 1, 'other place')}" if len(places) > 1 else ""
        warnings.warn(
            f"The forward of {name} branches on whether activations are finite{places[0]}{more}. It is traced as if "
            "all were; values that are not pass through it unchanged.",
            AssumedFiniteWarning,
            stacklevel=caller_level(),
        )
