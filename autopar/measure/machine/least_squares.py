"""Non-negative least squares in relative errors, for the few columns of a cost model's fits.

The sum Σ weight · (t_fit − t)² / (t · t_fit) is close to Σ weight · ln(t_fit / t)²: half the time costs as much as
twice the time. Each round divides the weights by the last solution's times.

All subsets of the columns are tried, since there are at most three. This keeps a fit to as few columns as explain the
times, which `scipy.optimize.nnls` would not do, and `autopar profile` needs no scipy.

Source: iteratively reweighted least squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

MAX_ROUNDS = 20  # weights converge in a few
MIN_REST = 0.25  # share of a point's time that must be unknown for its row to count
MIN_SHARE = 1e-3  # lower limit of a fitted time in the weights, as a share of the measured one
MIN_IMPROVEMENT = 1e-6  # share of the sum of squares by which an additional column must reduce the rest
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class FitRow:
    """One point of a fit: Σ coefficient · column + ``known_seconds`` should be ``seconds``."""

    columns: tuple[float, ...]
    known_seconds: float
    seconds: float
    weight: float = 1.0


def fit_coefficients(kind: str, rows: Sequence[FitRow], growth: int) -> tuple[float, ...]:
    """The coefficient of each column.

    Args:
        kind: of the measurements, for the error.
        growth: index of the column that is the work; its coefficient must be positive.

    Raises:
        UsageError: times do not grow with the work.
    """
    columns = np.array([[c / row.seconds for c in row.columns] for row in rows])
    rest = np.array([1 - row.known_seconds / row.seconds for row in rows])
    weights = np.array([row.weight for row in rows])
    # If nearly all of a point's time is known, the rest is mostly the error of that: it would only disturb the fit.
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
    """The best non-negative solution with a positive coefficient of ``growth``; None if there is none.

    Args:
        columns: [rows, columns].
        target: [rows].
    """
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
    """All sets of column indices that contain ``column``, small ones first."""
    other_columns = [c for c in range(count) if c != column]
    for size in range(count):
        yield from ((column, *chosen) for chosen in combinations(other_columns, size))
