"""What kernels of one kind take, fitted to points whose operations may be bound by memory after all.

An operation of f FLOPs and n bytes is priced (`autopar.ir.hardware.Hardware.op_seconds`) as

    t = max((f + half) / rate + n / bandwidth, (n + half_memory) / rate_memory) + launch

which is linear in half/rate, 1/rate and 1/bandwidth while one side of the maximum is chosen: operations that memory
bounds under one solution leave the next, until none changes sides, and the best of these solutions is taken.
``bandwidth`` is what traffic adds that arithmetic does not hide; products of matrices hide all of it.

Large points, of at least `LARGE_LAUNCHES` launches, are what steps are made of: smaller ones weigh less the shorter
they are, and errors are told of large ones and of all.

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
UNKNOWN_ERROR = 0.5  # of a fit that its points do not test, being no more than its constants
MIN_LARGE_LAUNCHES = 20


@dataclass(frozen=True)
class FitErrors:
    """Relative errors of the points of a fit of some constants, |t_fit / t − 1|, and which points are large."""

    values: tuple[float, ...]
    large: tuple[bool, ...]
    num_constants: int

    @property
    def error(self) -> float:
        """The 90th percentile among large points, or among all where none is."""
        chosen = [value for value, large in zip(self.values, self.large) if large]
        return self.percentile(chosen or self.values)

    @property
    def error_of_all(self) -> float:
        return self.percentile(self.values)

    def percentile(self, errors: Sequence[float]) -> float:
        """The error that a fit leaves."""
        least = UNKNOWN_ERROR if len(self.values) <= self.num_constants else MIN_ERROR
        return max(least, float(np.percentile(np.array(errors), ERROR_PERCENTILE)))


@dataclass(frozen=True)
class Curve:
    """Seconds of a kernel beyond its launch: start + FLOPs · per_flop + bytes · per_byte."""

    start: float
    per_flop: float
    per_byte: float

    def seconds(self, part: OpCounts) -> float:
        return self.start + part.flops * self.per_flop + part.num_bytes * self.per_byte

    @property
    def num_constants(self) -> int:
        """That are not 0."""
        return sum(value > 0 for value in (self.start, self.per_flop, self.per_byte))


@dataclass(frozen=True)
class DeviceCurves:
    """What all curves of a device share: the launch, and the traffic of a kernel, whose ``per_flop`` is 0."""

    launch_seconds: float
    traffic: Curve

    def seconds(self, part: OpCounts, curve: Curve) -> float:
        """What the fitted constants say of an operation."""
        return max(self.traffic.seconds(part), curve.seconds(part)) + self.launch_seconds

    def weight(self, point: MeasuredPoint) -> float:
        """How much a point counts."""
        return min(1.0, point.value / (MIN_LARGE_LAUNCHES * self.launch_seconds))

    def with_errors(self, curve: Curve, points: Sequence[MeasuredPoint], predicted: Sequence[float]) -> FittedCurve:
        """A curve with what it predicts of its points."""
        values = tuple(abs(seconds / p.value - 1) for p, seconds in zip(points, predicted, strict=True))
        loss = sum(
            self.weight(p) * (seconds - p.value) ** 2 / (seconds * p.value) for p, seconds in zip(points, predicted)
        )
        return FittedCurve(
            curve, FitErrors(values, tuple(self.weight(p) == 1 for p in points), curve.num_constants), loss
        )


@dataclass(frozen=True)
class FittedCurve:
    """A curve, the errors of the points that it was fitted to, and the sum that is to be small."""

    curve: Curve
    errors: FitErrors
    loss: float


def traffic_curve(points: Sequence[MeasuredPoint], launch: float) -> FittedCurve:
    """Of operations that memory bounds."""
    device = DeviceCurves(launch, Curve(0.0, 0.0, 0.0))
    rows = [FitRow((len(p.ops), p.num_bytes), len(p.ops) * launch, p.value, device.weight(p)) for p in points]
    start, per_byte = fit_coefficients("memory", rows, growth=1)
    curve = Curve(start, 0.0, per_byte)
    predicted = [sum(curve.seconds(part) + launch for part in p.ops) for p in points]
    return device.with_errors(curve, points, predicted)


def compute_curve(
    name: str, points: Sequence[MeasuredPoint], device: DeviceCurves, hides_traffic: bool, forward: Curve | None = None
) -> FittedCurve:
    """Of operations that compute.

    Args:
        hides_traffic: whether arithmetic hides all traffic.
        forward: of the first part of each point, where the curve is of the parts behind it.
    """
    first = 0 if forward is None else 1
    known = [sum(device.seconds(part, forward) for part in p.ops[:first] if forward) for p in points]
    parts = [p.ops[first:] for p in points]
    bound = [[False] * len(own) for own in parts]
    tried: list[FittedCurve] = []
    for _ in range(MAX_ROUNDS):
        rows = [
            fit_row(p, own, by, before, device, hides_traffic)
            for p, own, by, before in zip(points, parts, bound, known)
            if not all(by)
        ]
        if not rows:
            break
        start, per_flop, *per_byte = fit_coefficients(name, rows, growth=1)
        curve = Curve(start, per_flop, sum(per_byte))
        predicted = [before + sum(device.seconds(part, curve) for part in own) for before, own in zip(known, parts)]
        tried.append(device.with_errors(curve, points, predicted))
        sides = [[device.traffic.seconds(part) > curve.seconds(part) for part in own] for own in parts]
        if sides == bound:
            break
        bound = sides
    return min(tried, key=lambda fitted: fitted.loss)


def fit_row(
    point: MeasuredPoint,
    parts: Sequence[OpCounts],
    bound: Sequence[bool],
    known: float,
    device: DeviceCurves,
    hides_traffic: bool,
) -> FitRow:
    """A point of which some parts are bound by memory, and something is known before."""
    computing = [part for part, by in zip(parts, bound) if not by]
    known += len(parts) * device.launch_seconds
    known += sum(device.traffic.seconds(part) for part, by in zip(parts, bound) if by)
    columns = (len(computing), sum(part.flops for part in computing), sum(part.num_bytes for part in computing))
    return FitRow(columns[: 2 if hides_traffic else 3], known, point.value, device.weight(point))
