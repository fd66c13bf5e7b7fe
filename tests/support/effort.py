"""How much a run of the tests does: ``make test`` some cells of each matrix, ``make test-full`` all of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

VARIABLE = "AUTOPAR_TEST_FULL"  # set by conftest before any test is imported; scripts that tests start inherit it


def full() -> bool:
    """Whether everything runs."""
    return VARIABLE in os.environ


def examples(number: int, fast: int = 20) -> int:
    """Number of random examples of a test that tries ``number`` in a full run."""
    return number if full() else min(number, fast)


def only(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parametrisation, in order; those that are not among ``kept`` run in a full run only.

    Raises:
        AssertionError: one of ``kept`` is no value.
    """
    every = list(values)
    assert all(value in every for value in kept), f"{[v for v in kept if v not in every]} are no values"
    marks = {True: (), False: pytest.mark.full}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in kept]) for value in every
    ]
