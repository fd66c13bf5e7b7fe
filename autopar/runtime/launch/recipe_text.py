"""Texts of what a launcher's ranks are given and must have alike, and their comparison: recipes, arguments of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch

from autopar.errors import UsageError
from autopar.ir.units import first_few
from autopar.runtime.optim.param_groups import options_of
from autopar.runtime.optim.probe import nested
from autopar.runtime.rank import Rank
from autopar.runtime.spec import RankSpec

MAX_NAMED = 4  # differences that an error lists
SAME_ARGUMENTS = "Pass the same arguments to autopar.parallelize on every rank."
IMPLEMENTATIONS = ("fused", "foreach", "capturable")  # options that ranks may choose by their own parameters


def recipe_texts(spec: RankSpec) -> list[str]:
    """Everything but the plan that the ranks must have alike before they are made, one text each."""
    settings = {
        "precision": spec.autocast or "of the weights",
        "cuda_graph": spec.cuda_graph,
        "transport": spec.transport,
        **asdict(spec.settings),
    }
    recipe = {name: value for name, value in vars(spec.recipe).items() if value is not None}
    return [f"{name} {value_text(value)}" for name, value in (recipe | settings).items()]


def optimizer_texts(rank: Rank) -> list[str]:
    """Optimizer, its options, scheduler and averages of a rank, one text each."""
    optimizer, scheduler = rank.updater.optimizer, rank.updater.scheduler
    texts = [] if optimizer is None else [f"optimizer {name_of_type(optimizer)}"]
    for own in nested(optimizer) if optimizer is not None else ():
        for number, group in enumerate(own.param_groups):
            options = {name: value for name, value in options_of(group).items() if name not in IMPLEMENTATIONS}
            texts += [f"{name} {value_text(value)} in parameter group {number}" for name, value in options.items()]
    for what, thing in (("lr_scheduler", scheduler), ("ema", rank.ema and rank.ema.keeper)):
        if thing is not None:
            numbers = {name: value for name, value in vars(thing).items() if isinstance(value, int | float)}
            texts += [f"{what} {name_of_type(thing)}"]
            texts += [f"{name} {value_text(value)} of {what}" for name, value in sorted(numbers.items())]
    return texts


def call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call with its arguments."""
    return f"{name}({', '.join([*map(value_text, args), *(f'{k}={value_text(v)}' for k, v in kwargs.items())])})"


def value_text(value: Any) -> str:
    """Text of a value that is the same in all processes: numbers and texts, names of functions, names of other types.

    Floats have 12 digits, since processors may round the last ones differently. Reading a number on a GPU waits for it.
    """
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.12g}"
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(value_text, value))})"
    if isinstance(value, dict):
        return call_text("dict", (), value)
    if isinstance(value, partial):
        return call_text("partial", (value.func, *value.args), value.keywords)
    line = ""
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        line = f" of line {value.__code__.co_firstlineno}"
    return f"{value.__module__}.{value.__qualname__}{line}" if hasattr(value, "__qualname__") else name_of_type(value)


def name_of_type(value: Any) -> str:
    """Name of a value's type, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_agreement(texts: Sequence[Sequence[str]], rank: int, what: str, remedy: str) -> None:
    """Compare what all ranks have.

    Args:
        texts: of each rank.
        what: what the ranks do not do if their texts differ, for the message.

    Raises:
        UsageError: another rank's texts differ from this rank's; the message lists the differences.
    """
    other = next((number for number, words in enumerate(texts) if words != texts[rank]), None)
    if other is not None:
        mine, theirs = texts[rank], texts[other]
        raise UsageError(
            f"The {len(texts)} ranks do not {what}: rank {rank} has {only_in(mine, theirs)}; "
            f"rank {other} has {only_in(theirs, mine)}. {remedy}"
        )


def only_in(words: Sequence[str], others: Sequence[str]) -> str:
    """First few of the words that are not among ``others``, as one text."""
    known = set(others)
    unique = [word for word in words if word not in known]
    return first_few(unique, MAX_NAMED) or "nothing else"
