"""Constants of a cost model from raw points, with the error that each leaves.

Operations follow `autopar.measure.machine.curves`. Of messages t = latency + n / bandwidth, where n is what a rank of a
ring sends (`autopar.ir.hardware.ring_share`).

Each constant's error is the 90th percentile of the relative errors |t_fit / t − 1| of its large points; where a
measurement is the constant, the spread of its repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.ops.overlap import OVERLAP_WINDOWS
from autopar.errors import UsageError
from autopar.ir.hardware import COMPUTE_KINDS, DTYPES, ring_share
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.async_tp import ASYNC_TP_OPS
from autopar.measure.machine.cases import COLLECTIVES, FUSED, UNFUSED
from autopar.measure.machine.curves import (
    MIN_ERROR,
    UNKNOWN_ERROR,
    Curve,
    DeviceCurves,
    FitErrors,
    FittedCurve,
    compute_curve,
    traffic_curve,
)
from autopar.measure.machine.least_squares import FitRow, fit_coefficients
from autopar.measure.machine.points import MeasuredPoint

NORM = "layer_norm"  # by compiled programs, whose traffic alone counts


@dataclass(frozen=True)
class Constant:
    """A number of a cost model.

    Args:
        path: of its field in the file, such as ("launch", "plain").
        value: in SI base units.
        quantity: what `autopar.cost.hardware.cost_file.UNITS` calls it.
        num_points: that it was fitted from; 0 of an assumption.
        error_of_all: the error of large points and small ones.
        assumption: why it was not measured.
        note: what else is to be known of it.
    """

    path: tuple[str, ...]
    value: float
    quantity: str
    error: float
    num_points: int
    error_of_all: float = 0.0
    assumption: str = ""
    note: str = ""


def fit(points: Sequence[MeasuredPoint], setting: ProfileSetting) -> tuple[Constant, ...]:
    """All constants that the points give.

    Raises:
        UsageError: a kind is missing, or its times do not grow with its sizes.
    """
    launches = launch_constants(points)
    launch_seconds = {c.path[-1]: c.value for c in launches}["captured" if setting.device_type == "cuda" else "plain"]
    constants = [*capacity_constants(points)]
    streaming = [p for p in points_of_kind(points, "memory") if NORM not in p.name.split()]
    traffic = traffic_curve(streaming, launch_seconds)
    constants += memory_constants(points, streaming, traffic, launch_seconds)
    constants += launches
    constants += compute_constants(points, DeviceCurves(launch_seconds, traffic.curve))
    constants += optimizer_constants(points)
    if setting.devices > 1:
        rows = [FitRow((1, p.num_bytes), 0, p.value) for p in points_of_kind(points, "point-to-point")]
        constants += link_constants(("link",), "point-to-point", rows)
        constants += collective_constants(points)
        constants += beside_constants(points, DeviceCurves(launch_seconds, traffic.curve), constants)
    return tuple(constants)


def points_of_kind(points: Sequence[MeasuredPoint], kind: str, dtype: str = "") -> list[MeasuredPoint]:
    """The points of a kind, or of one dtype of it.

    Raises:
        UsageError: there are none.
    """
    found = [p for p in points if p.kind == kind and dtype in ("", p.dtype)]
    if not found:
        what = f"{kind} in {dtype}" if dtype else kind
        raise UsageError(f"A cost model needs {what}, of which there is no measurement. Measure it with --only {kind}.")
    return found


def capacity_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Memory for tensors."""
    (point,) = points_of_kind(points, "capacity")
    return [Constant(("memory", "capacity"), point.value, "bytes", MIN_ERROR, 1)]


def launch_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Of each way; one that does not exist on the device is taken for the next slower one."""
    measured = {p.name.split()[-1]: p for p in points_of_kind(points, "launch")}
    if "plain" not in measured:
        raise UsageError("A cost model needs launch plain, of which there is no measurement. Use --only launch.")
    constants: list[Constant] = []
    for mode in ("plain", "compiled", "captured"):
        path = ("launch", mode)
        if mode in measured:
            point = measured[mode]
            constants.append(Constant(path, point.value, "seconds", max(MIN_ERROR, point.spread), 1))
        else:
            slower = constants[-1]
            reason = f"as {slower.path[-1]}, because programs are not {mode} on this machine"
            constants.append(Constant(path, slower.value, "seconds", UNKNOWN_ERROR, 0, assumption=reason))
    return constants


def memory_constants(
    points: Sequence[MeasuredPoint], streaming: Sequence[MeasuredPoint], traffic: FittedCurve, launch: float
) -> list[Constant]:
    """``bandwidth`` is the most that large operations reached; their efficiency is the fit's share of it."""
    curve, largest = traffic.curve, max(p.num_bytes for p in streaming)
    rate = 1 / curve.per_byte
    peak_bandwidth = max(rate, *(p.num_bytes / p.value for p in streaming if 2 * p.num_bytes >= largest))
    constants = [
        fitted_constant(("memory", "bandwidth"), peak_bandwidth, "bytes per second", traffic.errors),
        fitted_constant(("memory", "efficiency"), rate / peak_bandwidth, "share", traffic.errors),
        fitted_constant(("memory", "half"), curve.start * rate, "bytes", traffic.errors),
    ]
    norms = [p for p in points_of_kind(points, "memory") if NORM in p.name.split() and 2 * p.num_bytes >= largest / 2]
    if norms:
        device = DeviceCurves(launch, curve)
        slowdowns = [p.value / sum(device.seconds(part, curve) for part in p.ops) for p in norms]
        note = f"for element-wise operations; {NORM} by itself takes up to {max(slowdowns):.2g} times as long"
        constants[1] = replace(constants[1], note=note)
    return constants


def compute_constants(points: Sequence[MeasuredPoint], device: DeviceCurves) -> list[Constant]:
    """Peaks and efficiencies: the peak of a dtype is the most that matmuls reach or approach in it."""
    peaks: list[Constant] = []
    curves: list[Constant] = []
    for dtype in DTYPES:
        matmul_points = points_of_kind(points, "matmul", dtype)
        matmul_curve = compute_curve(f"matmul {dtype}", matmul_points, device, hides_traffic=True)
        peak = max(1 / matmul_curve.curve.per_flop, *(p.flops / p.value for p in matmul_points))
        peaks.append(fitted_constant(("peak_flops", dtype), peak, "FLOPs per second", matmul_curve.errors))
        curves += curve_constants(("matmul", dtype), matmul_curve, peak)
    for kind in COMPUTE_KINDS[1:]:
        points_of_kind(points, kind)
        measured: dict[str, list[Constant]] = {}
        for peak, dtype in zip(peaks, DTYPES):
            dtype_points = [p for p in points if (p.kind, p.dtype) == (kind, dtype)]
            if dtype_points:
                measured[dtype] = forward_backward_constants(kind, dtype, dtype_points, device, peak.value)
        for dtype in DTYPES:
            curves += measured.get(dtype) or assumed_constants(dtype, measured)
    return [*peaks, *curves]


def forward_backward_constants(
    kind: str, dtype: str, points: Sequence[MeasuredPoint], device: DeviceCurves, peak: float
) -> list[Constant]:  # fmt: skip
    """The curve of forwards, and that of the backwards that are measured together with them."""
    name, forward_points = f"{kind} {dtype}", [p for p in points if len(p.ops) == 1]
    forward = compute_curve(name, forward_points, device, hides_traffic=False)
    both_points = [p for p in points if len(p.ops) > 1]
    backward = compute_curve(name, both_points, device, hides_traffic=False, forward=forward.curve)
    return [
        *curve_constants((kind, dtype), forward, peak),
        *curve_constants((kind, dtype, "backward"), backward, peak),
    ]


def assumed_constants(dtype: str, measured: Mapping[str, Sequence[Constant]]) -> list[Constant]:
    """What stands for the curves of a dtype in which a kind was not measured: those of the least share of a peak."""
    stand_in_dtype = min(measured, key=lambda known: measured[known][0].value)
    reason = f"as in {stand_in_dtype}, because it was not measured"
    return [
        replace(c, path=(*c.path[:2], dtype, *c.path[3:]), error=UNKNOWN_ERROR, error_of_all=0.0, num_points=0,
                assumption=reason)
        for c in measured[stand_in_dtype]
    ]  # fmt: skip


def curve_constants(path: tuple[str, ...], found: FittedCurve, peak: float) -> list[Constant]:
    """Those of one curve; without a bandwidth where arithmetic hides all traffic."""
    curve = found.curve
    constants = [
        fitted_constant(("efficiency", *path, "asymptote"), 1 / (curve.per_flop * peak), "ratio", found.errors),
        fitted_constant(("efficiency", *path, "half"), curve.start / curve.per_flop, "FLOPs", found.errors),
    ]
    if curve.per_byte:
        bandwidth = fitted_constant(
            ("efficiency", *path, "bandwidth"), 1 / curve.per_byte, "bytes per second", found.errors
        )
        constants.append(bandwidth)
    return constants


def fitted_constant(path: tuple[str, ...], value: float, quantity: str, errors: FitErrors) -> Constant:
    """A constant of a fit."""
    return Constant(path, value, quantity, errors.error, len(errors.values), errors.error_of_all)


def optimizer_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Bytes per second of a fused AdamW step, of large models above all."""
    found = points_of_kind(points, "optimizer")
    longest = max(p.value for p in found)
    rows = [FitRow((p.num_bytes,), 0, p.value, p.value / longest) for p in found]
    (per_byte,) = fit_coefficients("optimizer", rows, growth=0)
    return [
        fitted_constant(("optimizer", "bandwidth"), 1 / per_byte, "bytes per second", row_errors(rows, (per_byte,)))
    ]


def row_errors(rows: Sequence[FitRow], solution: Sequence[float]) -> FitErrors:
    """Of rows that all count."""
    values = tuple(abs(sum(c * x for c, x in zip(row.columns, solution)) / row.seconds - 1) for row in rows)
    return FitErrors(values, (True,) * len(values), len(solution))


def collective_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Of each kind and group size; what stands for others is fitted to all-reduces of all sizes."""
    constants = link_constants(("collective",), "all-reduce", ring_rows(points_of_kind(points, "all-reduce")))
    for kind in COLLECTIVES:
        for ranks in sorted({p.ranks for p in points_of_kind(points, kind)}):
            rows = ring_rows([p for p in points if p.kind == kind and p.ranks == ranks])
            constants += link_constants(("collective", kind, str(ranks)), kind, rows)
    return constants


def ring_rows(points: Sequence[MeasuredPoint]) -> list[FitRow]:
    """Collectives of one kind."""
    return [
        FitRow((1.0, ring_share(kind, p.ranks) * p.num_bytes), 0, p.value)
        for p in points
        for kind in COLLECTIVES
        if kind == p.kind
    ]


def link_constants(path: tuple[str, ...], kind: str, rows: Sequence[FitRow]) -> list[Constant]:
    """Latency and bandwidth."""
    latency, per_byte = fit_coefficients(kind, rows, growth=1)
    errors = row_errors(rows, (latency, per_byte))
    return [
        fitted_constant((*path, "latency"), latency, "seconds", errors),
        fitted_constant((*path, "bandwidth"), 1 / per_byte, "bytes per second", errors),
    ]


def beside_constants(
    points: Sequence[MeasuredPoint], device: DeviceCurves, known: Sequence[Constant]
) -> list[Constant]:
    """What is hidden of collectives beside the products of linear layers, as a share of what is long enough to be:
    Σ hidden · hideable / Σ hideable², at least 0 and at most 1. Nothing where no such layers were measured.

    Args:
        known: constants of collectives.
    """
    values = {c.path: c.value for c in known}
    pairs = [(p, fused_counterpart(p, points)) for p in points if p.kind == "beside" and UNFUSED in p.name.split()]
    if not pairs:
        return []
    curve = compute_curve(
        "matmul", points_of_kind(points, "matmul", pairs[0][0].dtype), device, hides_traffic=True
    ).curve
    hideable = np.array([hideable_seconds(apart, device, curve, values) for apart, _ in pairs])
    apart, joined = (np.array([p.value for p in column]) for column in zip(*pairs, strict=True))
    share = float(np.clip(hideable @ (apart - joined) / (hideable @ hideable), 0, 1))
    relative = abs((apart - share * hideable) / joined - 1)
    errors = FitErrors(tuple(relative.tolist()), (True,) * len(pairs), 1)
    return [fitted_constant(("beside", "layers"), share, "share", errors)]


def fused_counterpart(apart: MeasuredPoint, points: Sequence[MeasuredPoint]) -> MeasuredPoint:
    """The point of the operator that is both.

    Raises:
        UsageError: it was not measured.
    """
    name = apart.name.replace(UNFUSED, FUSED)
    found = next((p for p in points if p.name == name), None)
    if found is None:
        raise UsageError(f"A cost model needs {name}, of which there is no measurement. Use --only beside.")
    return found


def hideable_seconds(
    point: MeasuredPoint, device: DeviceCurves, curve: Curve, values: Mapping[tuple[str, ...], float]
) -> float:
    """How much of a layer's collectives its products are long enough to hide, forwards and backwards."""
    operator = point.name.split()[1]
    beside, kinds = OVERLAP_WINDOWS[operator](point.ranks), ASYNC_TP_OPS[operator].kinds
    forward, *backward = (device.seconds(part, curve) for part in point.ops[:3])
    comm_seconds = (
        values["collective", kind, str(point.ranks), "latency"]
        + ring_share(kind, point.ranks) * part.num_bytes / values["collective", kind, str(point.ranks), "bandwidth"]
        if kind is not None
        else 0.0
        for kind, part in zip(kinds, point.ops[3:], strict=True)
    )
    window_seconds = beside.forward * forward, beside.backward * sum(backward)
    return sum(map(min, window_seconds, comm_seconds))
