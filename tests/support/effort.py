"""Size of a test run: ``make test`` runs some cells of each matrix, ``make test-full`` all of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

VARIABLE = "AUTOPAR_TEST_FULL"  # set by conftest before any test is imported; scripts that tests start inherit it


def full() -> bool:
    """Whether this is a full run."""
    return VARIABLE in os.environ


def examples(number: int, fast: int = 20) -> int:
    """Number of random examples: ``number`` in a full run, at most ``fast`` otherwise."""
    return number if full() else min(number, fast)


def only(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parametrisation, in order; those outside ``kept`` are marked for the full run.

    Raises:
        AssertionError: one of ``kept`` is not among ``values``.
    """
    every = list(values)
    assert all(value in every for value in kept), f"{[v for v in kept if v not in every]} are no values"
    marks = {True: (), False: pytest.mark.full}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in kept]) for value in every
    ]
