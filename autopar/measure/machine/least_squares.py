"""Non-negative coefficients with the least sum of squared errors, relative to measured times and fitted ones.

Σ weight · (t_fit − t)² / (t · t_fit) is near the squares of ln(t_fit / t): half as long costs what twice as long does.
It is found by solving with the weights of the solution before.

Source: iteratively reweighted least squares; the non-negative solution by all sets of columns, of which there are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

MAX_ROUNDS = 20  # in which weights settle; a few do
MIN_REST = 0.25  # of a measured time
MIN_SHARE = 1e-3  # of a measured time, below which a fitted one counts as that
MIN_IMPROVEMENT = 1e-6  # share of the times' squares that another column must explain to be used
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class FitRow:
    """One point of a fit: Σ coefficient · column + known should be ``seconds``."""

    columns: tuple[float, ...]
    known_seconds: float
    seconds: float
    weight: float = 1.0


def fit_coefficients(kind: str, rows: Sequence[FitRow], growth: int) -> tuple[float, ...]:
    """The coefficient of each column.

    Args:
        growth: the column that must count, because it is the work.

    Raises:
        UsageError: times do not grow with it.
    """
    columns = np.array([[c / row.seconds for c in row.columns] for row in rows])
    rest = np.array([1 - row.known_seconds / row.seconds for row in rows])
    weights = np.array([row.weight for row in rows])
    # Where what is known is nearly all of the time, what is left is its error: such rows count in the error alone.
    working = rest >= MIN_REST
    if working.sum() > 1:
        columns, rest, weights = columns[working], rest[working], weights[working]
    scale = np.maximum(abs(columns).max(axis=0), np.finfo(float).tiny)
    columns = columns / scale
    solution, current = None, weights
    for _ in range(MAX_ROUNDS):
        solution = solve_nonnegative(columns * np.sqrt(current)[:, None], rest * np.sqrt(current), growth)
        if solution is None:
            raise UsageError(
                f"Times of {kind} do not grow with sizes in {len(rows)} measurements: something else was using the "
                f"machine. Measure them again with --only {kind.split()[0]}."
            )
        current = weights / np.maximum(columns @ solution, MIN_SHARE)
    assert solution is not None
    return tuple((solution / scale).tolist())


def solve_nonnegative(columns: Numbers, target: Numbers, growth: int) -> Numbers | None:
    """The best non-negative solution with a positive coefficient of ``growth``, of few columns if these do."""
    best, best_rest = None, np.inf
    for chosen in column_sets(growth, columns.shape[1]):
        solution = np.zeros(columns.shape[1])
        solution[list(chosen)] = np.linalg.lstsq(columns[:, chosen], target)[0]
        rest = float(((columns @ solution - target) ** 2).sum())
        feasible = solution[growth] > 0 and (solution >= 0).all()
        if feasible and rest < best_rest - MIN_IMPROVEMENT * float(target @ target):
            best, best_rest = solution, rest
    return best


def column_sets(column: int, count: int) -> Iterator[tuple[int, ...]]:
    """All sets of columns with that one, small ones first."""
    others = [c for c in range(count) if c != column]
    for size in range(count):
        yield from ((column, *chosen) for chosen in combinations(others, size))
