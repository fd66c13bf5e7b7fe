"""Seconds of one kind of kernels as a function of FLOPs and bytes, fitted to points of which some are memory-bound.

An operation of f FLOPs and n bytes is priced (`autopar.ir.hardware.Hardware.op_seconds`) as

    t = max((f + half) / rate + n / bandwidth, (n + half_memory) / rate_memory) + launch

Once the side of the maximum is fixed for every operation, t is linear in half/rate, 1/rate and 1/bandwidth. Operations
that are memory-bound under one solution leave the next fit, until no operation changes sides. The solution with the
least loss is taken. ``bandwidth`` is the cost of traffic that arithmetic does not hide; matrix products hide all of it.

Points of at least `MIN_LARGE_LAUNCHES` launches are large: training steps consist of such kernels. The weight of a
smaller point is proportional to its time. Errors are reported for large points, and for all.

Source: roofline (Williams, Waterman, Patterson 2009), as in `autopar.ir.hardware`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.measure.machine.least_squares import MAX_ROUNDS, FitRow, fit_coefficients
from autopar.measure.machine.points import MeasuredPoint, OpCounts

ERROR_PERCENTILE = 90
MIN_ERROR = 0.001  # nothing measured is exact
UNKNOWN_ERROR = 0.5  # of a fit with no more points than constants, which nothing tests
MIN_LARGE_LAUNCHES = 20


@dataclass(frozen=True)
class FitErrors:
    """Relative errors |t_fit / t − 1| of the points of a fit, and which of the points are large."""

    values: tuple[float, ...]
    large: tuple[bool, ...]
    num_constants: int

    @property
    def error(self) -> float:
        """The 90th percentile over large points, or over all if none is large."""
        large_values = [value for value, large in zip(self.values, self.large) if large]
        return self.percentile(large_values or self.values)

    @property
    def error_of_all(self) -> float:
        """The 90th percentile over all points."""
        return self.percentile(self.values)

    def percentile(self, errors: Sequence[float]) -> float:
        """The 90th percentile of some errors, but at least what is certain of a fit with so few points."""
        least = UNKNOWN_ERROR if len(self.values) <= self.num_constants else MIN_ERROR
        return max(least, float(np.percentile(np.array(errors), ERROR_PERCENTILE)))


@dataclass(frozen=True)
class Curve:
    """Seconds of a kernel without its launch: start + FLOPs · per_flop + bytes · per_byte."""

    start: float
    per_flop: float
    per_byte: float

    def seconds(self, op: OpCounts) -> float:
        return self.start + op.flops * self.per_flop + op.num_bytes * self.per_byte

    @property
    def num_constants(self) -> int:
        """Number of non-zero coefficients."""
        return sum(value > 0 for value in (self.start, self.per_flop, self.per_byte))


@dataclass(frozen=True)
class DeviceCurves:
    """The part of a device's prices that all kinds share.

    Args:
        launch_seconds: launch overhead of one operation.
        traffic: the curve of memory-bound operations; its ``per_flop`` is 0.
    """

    launch_seconds: float
    traffic: Curve

    def seconds(self, op: OpCounts, curve: Curve) -> float:
        """Predicted seconds of an operation whose kind has this curve."""
        return max(self.traffic.seconds(op), curve.seconds(op)) + self.launch_seconds

    def weight(self, point: MeasuredPoint) -> float:
        """Weight of a point in a fit: 1 if it is large."""
        return min(1.0, point.value / (MIN_LARGE_LAUNCHES * self.launch_seconds))

    def with_errors(self, curve: Curve, points: Sequence[MeasuredPoint], predicted: Sequence[float]) -> FittedCurve:
        """A curve with its errors and its loss.

        Args:
            predicted: seconds of each point by the curve.
        """
        pairs = list(zip(points, predicted, strict=True))
        values = tuple(abs(seconds / p.value - 1) for p, seconds in pairs)
        loss = sum(self.weight(p) * (seconds - p.value) ** 2 / (seconds * p.value) for p, seconds in pairs)
        large = tuple(self.weight(p) == 1 for p in points)
        return FittedCurve(curve, FitErrors(values, large, curve.num_constants), loss)


@dataclass(frozen=True)
class FittedCurve:
    """A curve, the errors of the points that it was fitted to, and the weighted sum of squares that a fit minimises."""

    curve: Curve
    errors: FitErrors
    loss: float


def traffic_curve(points: Sequence[MeasuredPoint], launch: float) -> FittedCurve:
    """The curve of memory-bound operations.

    Args:
        launch: overhead of one operation, second.
    """
    device = DeviceCurves(launch, Curve(0.0, 0.0, 0.0))
    rows = [FitRow((len(p.ops), p.num_bytes), len(p.ops) * launch, p.value, device.weight(p)) for p in points]
    start, per_byte = fit_coefficients("memory", rows, growth=1)
    curve = Curve(start, 0.0, per_byte)
    predicted = [sum(curve.seconds(op) + launch for op in p.ops) for p in points]
    return device.with_errors(curve, points, predicted)


def compute_curve(
    name: str, points: Sequence[MeasuredPoint], device: DeviceCurves, hides_traffic: bool, forward: Curve | None = None
) -> FittedCurve:
    """The curve of compute-bound operations.

    Args:
        name: of the kind, for the error if times do not grow with FLOPs.
        hides_traffic: whether arithmetic hides all memory traffic.
        forward: curve of the first operation of each point, if the curve to fit is that of the operations after it.
    """
    first = 0 if forward is None else 1
    known = [sum(device.seconds(op, forward) for op in p.ops[:first] if forward) for p in points]
    fitted_ops = [p.ops[first:] for p in points]
    memory_bound = [[False] * len(ops) for ops in fitted_ops]
    solutions: list[FittedCurve] = []
    for _ in range(MAX_ROUNDS):
        rows = [
            fit_row(p, list(zip(ops, bound)), seconds, device, hides_traffic)
            for p, ops, bound, seconds in zip(points, fitted_ops, memory_bound, known)
            if not all(bound)
        ]
        if not rows:
            break
        start, per_flop, *per_byte = fit_coefficients(name, rows, growth=1)
        curve = Curve(start, per_flop, sum(per_byte))
        predicted = [seconds + sum(device.seconds(op, curve) for op in ops) for seconds, ops in zip(known, fitted_ops)]
        solutions.append(device.with_errors(curve, points, predicted))
        sides = [[device.traffic.seconds(op) > curve.seconds(op) for op in ops] for ops in fitted_ops]
        if sides == memory_bound:
            break
        memory_bound = sides
    return min(solutions, key=lambda solution: solution.loss)


def fit_row(
    point: MeasuredPoint,
    ops: Sequence[tuple[OpCounts, bool]],
    known_seconds: float,
    device: DeviceCurves,
    hides_traffic: bool,
) -> FitRow:
    """A point as a row of the fit: 1, FLOPs and, unless arithmetic hides it, traffic of its compute-bound operations.

    Args:
        ops: operations whose curve is fitted, each with whether it is memory-bound.
        known_seconds: of the point's other operations.
    """
    computing = [op for op, bound in ops if not bound]
    known_seconds += len(ops) * device.launch_seconds
    known_seconds += sum(device.traffic.seconds(op) for op, bound in ops if bound)
    columns = (len(computing), sum(op.flops for op in computing), sum(op.num_bytes for op in computing))
    return FitRow(columns[: 2 if hides_traffic else 3], known_seconds, point.value, device.weight(point))
