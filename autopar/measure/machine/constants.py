"""A fitted number of a cost model, with its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.measure.machine.curves import FitErrors
from autopar.measure.machine.least_squares import FitRow


@dataclass(frozen=True)
class Constant:
    """A number of a cost model.

    Args:
        path: of its field in the file, such as ("launch", "plain").
        value: in SI base units.
        quantity: key of `autopar.cost.hardware.cost_file.UNITS`.
        error: relative; of large points.
        num_points: number of points in the fit; 0 for an assumption.
        error_of_all: relative error of large and small points.
        assumption: why this value was assumed instead of measured; empty if it was measured.
        note: remark that the file repeats.
    """

    path: tuple[str, ...]
    value: float
    quantity: str
    error: float
    num_points: int
    error_of_all: float = 0.0
    assumption: str = ""
    note: str = ""


def fitted_constant(path: tuple[str, ...], value: float, quantity: str, errors: FitErrors) -> Constant:
    """A constant with the errors of its fit."""
    return Constant(path, value, quantity, errors.error, len(errors.values), errors.error_of_all)


def row_errors(rows: Sequence[FitRow], solution: Sequence[float]) -> FitErrors:
    """Relative errors of a solution; all rows count as large."""
    values = tuple(abs(sum(c * x for c, x in zip(row.columns, solution)) / row.seconds - 1) for row in rows)
    return FitErrors(values, (True,) * len(values), len(solution))
