"""Warning of a run that traces its model for many different shapes or constants, with the argument that changes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import VariantWarning, caller_level
from autopar.ir.pytree import leaves
from autopar.trace.call import Call

MANY_VARIANTS = 20  # variants of a run, at the last of which it is warned
MAX_LISTED = 4  # values that the warning lists


@dataclass(frozen=True)
class Variation:
    """Different values of one property of an argument, in the order of their traces."""

    what: str
    values: tuple[str, ...]
    remedy: str


def argument_names(model: nn.Module, call: Call) -> list[str]:
    """Name in ``model.forward`` of the argument that holds each leaf of a call."""
    parameters = list(inspect.signature(model.forward).parameters)
    named = [(parameters[min(i, len(parameters) - 1)], value) for i, value in enumerate(call.args)]
    return [name for name, value in (*named, *call.kwargs.items()) for _ in leaves(value)]


def variations(names: Sequence[str], signatures: Sequence[tuple[Any, ...]]) -> list[Variation]:
    """How the arguments of a run's variants differ: constants first, then shapes, then samples.

    Args:
        names: argument of each leaf.
        signatures: `input_signature` of each variant's microbatch.
    """
    constants, shapes, samples = [], [], []
    for name, column in zip(names, zip(*signatures, strict=True), strict=True):
        tensors = [first for first, _ in column if isinstance(first, tuple)]
        numbers = [f"{value}" for first, value in column if not isinstance(first, tuple)]
        constants.append(
            Variation(f"value of `{name}`", distinct(numbers), f"Pass {name} as a tensor: torch.tensor({name})")
        )
        shapes.append(
            Variation(
                f"shape of `{name}` without its first dim",
                distinct([f"{list(shape[1:])}" for shape in tensors]),
                "Resize or pad it to a few sizes",
            )
        )
        samples.append(
            Variation(
                f"first size of `{name}`, cut into microbatches,",
                distinct([f"{shape[0]}" for shape in tensors if shape]),
                "Pass batches of few sizes: drop or pad ragged ones",
            )
        )
    return [*constants, *shapes, *samples]


def distinct(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def warn_of_variants(model_name: str, names: Sequence[str], signatures: Sequence[tuple[Any, ...]]) -> None:
    """Warn that a run has `MANY_VARIANTS` variants; names the property that has most values."""
    most = max(variations(names, signatures), key=lambda variation: len(variation.values))
    values = ", ".join([*most.values[:MAX_LISTED], "…"])
    warnings.warn(
        f"{model_name} has been traced for {len(signatures)} variants of its inputs. Each {most.what} is one: {values} "
        f"({len(most.values)} so far). Each costs a trace, its compilation and memory. {most.remedy}.",
        VariantWarning,
        stacklevel=caller_level(),
    )
