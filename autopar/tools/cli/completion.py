"""Words that a shell offers for a flag or for MODEL, after ``autopar --install-completion``.

None of them needs torch: a shell asks at each press of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args, get_type_hints


def offered(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completion of a flag, from a function that lists all words."""

    def matching(incomplete: str) -> list[str]:
        return sorted(word for word in words() if word.startswith(incomplete))

    return matching


def choices(field: str) -> Callable[[str], list[str]]:
    """Completion of a flag that takes what a field of `PlanConstraints` takes."""
    return offered(partial(literals_of, field))


def literals_of(field: str) -> list[str]:
    """Texts among the values that a field of `PlanConstraints` may have."""
    from autopar.ir.plan_constraints import PlanConstraints

    hint = get_type_hints(PlanConstraints)[field]
    values = [value for part in (hint, *get_args(hint)) for value in get_args(part)]
    return [value for value in values if isinstance(value, str)]


def hardware_names() -> Iterable[str]:
    """Names of the shipped cost models."""
    from autopar.cost.hardware.load import hardware_names

    return hardware_names()


def timm_names() -> Iterable[str]:
    """Names of timm's models."""
    from autopar.api.model_names import known_names

    return known_names("timm")
