"""Constants of a cost model, fitted to measured points.

Times of operations follow `autopar.measure.machine.curves`. Times of messages and collectives are t = latency +
n / bandwidth, where n is the bytes that a rank of a ring sends (`autopar.ir.hardware.ring_share`).

Error: each constant carries the 90th percentile of the relative errors |t_fit / t − 1| of its large points. A constant
that is one measurement carries the spread of its repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.ops.kernel_shapes import BACKWARD, FORWARD
from autopar.cost.ops.overlap import OVERLAP_WINDOWS
from autopar.errors import UsageError
from autopar.ir.hardware import COMPUTE_KINDS, DTYPES, ring_share
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.async_tp import ASYNC_TP_OPS
from autopar.measure.machine.cases import COLLECTIVES
from autopar.measure.machine.constants import Constant, fitted_constant, row_errors
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
from autopar.measure.machine.fit_network import network_constants
from autopar.measure.machine.least_squares import FitRow, fit_coefficients
from autopar.measure.machine.points import MeasuredPoint

NORM = "layer_norm"  # compiled programs fuse it, so its points only give a note


def fit(points: Sequence[MeasuredPoint], setting: ProfileSetting) -> tuple[Constant, ...]:
    """All constants of a cost model; links and collectives only if several devices measured.

    Raises:
        UsageError: a kind has no points, or its times do not grow with its sizes.
    """
    launches = launch_constants(points)
    launch_seconds = {c.path[-1]: c.value for c in launches}["captured" if setting.device_type == "cuda" else "plain"]
    constants = [*capacity_constants(points)]
    streaming = [p for p in points_of_kind(points, "memory") if p.case.variant != NORM]
    traffic = traffic_curve(streaming, launch_seconds)
    constants += memory_constants(points, streaming, traffic, launch_seconds)
    constants += launches
    constants += compute_constants(points, DeviceCurves(launch_seconds, traffic.curve), setting.device_type == "cuda")
    constants += optimizer_constants(points)
    if setting.devices > 1:
        rows = [FitRow((1, p.num_bytes), 0, p.value) for p in points_of_kind(points, "point-to-point")]
        constants += link_constants(("link",), "point-to-point", rows)
        constants += collective_constants(points)
        constants += overlap_constants(points, DeviceCurves(launch_seconds, traffic.curve), constants)
    constants += network_constants(points, setting, constants)
    return tuple(constants)


def points_of_kind(points: Sequence[MeasuredPoint], kind: str, dtype: str = "") -> list[MeasuredPoint]:
    """The points of a kind inside a node, of all dtypes or of one.

    Raises:
        UsageError: there is no such point.
    """
    matching = [p for p in points if p.case.category == kind and dtype in ("", p.dtype)]
    if not matching:
        what = f"{kind} in {dtype}" if dtype else kind
        raise UsageError(f"A cost model needs {what}, of which there is no measurement. Measure it with --only {kind}.")
    return matching


def capacity_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Bytes of a device's memory that tensors can use."""
    (point,) = points_of_kind(points, "capacity")
    return [Constant(("memory", "capacity"), point.value, "bytes", MIN_ERROR, 1)]


def launch_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Launch overhead of each execution mode. A mode that this device lacks gets the value of the next slower mode."""
    measured = {p.case.variant: p for p in points_of_kind(points, "launch")}
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
    """Bandwidth, efficiency and half-efficiency size of memory traffic.

    The bandwidth is the highest that a large operation reached; the efficiency is the fitted bandwidth's share of it.

    Args:
        streaming: points that the traffic curve was fitted to.
        launch: overhead of one operation, second.
    """
    curve, largest = traffic.curve, max(p.num_bytes for p in streaming)
    rate = 1 / curve.per_byte
    peak_bandwidth = max(rate, *(p.num_bytes / p.value for p in streaming if 2 * p.num_bytes >= largest))
    constants = [
        fitted_constant(("memory", "bandwidth"), peak_bandwidth, "bytes per second", traffic.errors),
        fitted_constant(("memory", "efficiency"), rate / peak_bandwidth, "share", traffic.errors),
        fitted_constant(("memory", "half"), curve.start * rate, "bytes", traffic.errors),
    ]
    norms = [p for p in points_of_kind(points, "memory") if p.case.variant == NORM and 2 * p.num_bytes >= largest / 2]
    if norms:
        device = DeviceCurves(launch, curve)
        slowdowns = [p.value / sum(device.seconds(op, curve) for op in p.ops) for p in norms]
        note = f"for element-wise operations; {NORM} by itself takes up to {max(slowdowns):.2g} times as long"
        constants[1] = replace(constants[1], note=note)
    return constants


def in_tiles(point: MeasuredPoint) -> MeasuredPoint:
    """A point of attention with the FLOPs of whole tiles, by which the planner prices it on a GPU."""
    _, _, tokens, width = point.case.sizes
    directions = zip((FORWARD, BACKWARD), point.ops)
    ops = (replace(op, flops=op.flops * tiles.padding(tokens, tokens, width)) for tiles, op in directions)
    return replace(point, ops=tuple(ops))


def compute_constants(points: Sequence[MeasuredPoint], device: DeviceCurves, on_gpu: bool) -> list[Constant]:
    """Peaks and efficiencies. A dtype's peak is the highest rate that its matmuls reach, or the limit of their fit."""
    peaks: list[Constant] = []
    curves: list[Constant] = []
    for dtype in DTYPES:
        matmul_points = points_of_kind(points, "matmul", dtype)
        matmul_curve = compute_curve(f"matmul {dtype}", matmul_points, device, hides_traffic=True)
        peak = max(1 / matmul_curve.curve.per_flop, *(p.flops / p.value for p in matmul_points))
        peaks.append(fitted_constant(("peak_flops", dtype), peak, "FLOPs per second", matmul_curve.errors))
        curves += curve_constants(("matmul", dtype), matmul_curve, peak, device)
    for kind in COMPUTE_KINDS[1:]:
        points_of_kind(points, kind)
        measured: dict[str, list[Constant]] = {}
        for peak, dtype in zip(peaks, DTYPES):
            dtype_points = [p for p in points if (p.kind, p.dtype) == (kind, dtype)]
            if kind == "attention" and on_gpu:
                dtype_points = list(map(in_tiles, dtype_points))
            if dtype_points:
                measured[dtype] = forward_backward_constants(kind, dtype, dtype_points, device, peak.value)
        for dtype in DTYPES:
            curves += measured.get(dtype) or assumed_constants(dtype, measured)
    return [*peaks, *curves]


def forward_backward_constants(
    kind: str, dtype: str, points: Sequence[MeasuredPoint], device: DeviceCurves, peak: float
) -> list[Constant]:  # fmt: skip
    """Constants of the forward's curve, and of the backward's, which is measured together with its forward.

    Args:
        peak: of the dtype, FLOPs per second.
    """
    name, forward_points = f"{kind} {dtype}", [p for p in points if len(p.ops) == 1]
    forward = compute_curve(name, forward_points, device, hides_traffic=False)
    both_points = [p for p in points if len(p.ops) > 1]
    backward = compute_curve(name, both_points, device, hides_traffic=False, forward=forward.curve)
    return [
        *curve_constants((kind, dtype), forward, peak, device),
        *curve_constants((kind, dtype, "backward"), backward, peak, device),
    ]


def assumed_constants(dtype: str, measured: Mapping[str, Sequence[Constant]]) -> list[Constant]:
    """Constants of a dtype in which a kind was not measured: copies from the dtype that reaches least of its peak."""
    stand_in_dtype = min(measured, key=lambda other: measured[other][0].value)
    reason = f"as in {stand_in_dtype}, because it was not measured"
    return [
        replace(c, path=(*c.path[:2], dtype, *c.path[3:]), error=UNKNOWN_ERROR, error_of_all=0.0, num_points=0,
                assumption=reason)
        for c in measured[stand_in_dtype]
    ]  # fmt: skip


def curve_constants(path: tuple[str, ...], fit: FittedCurve, peak: float, device: DeviceCurves) -> list[Constant]:
    """Constants of one curve; without a bandwidth if arithmetic hides all traffic.

    A bandwidth above the memory's is that of kernels whose arithmetic hides a part of their traffic; its note says so.

    Args:
        peak: of the dtype, FLOPs per second.
    """
    curve, path = fit.curve, ("efficiency", *path)
    constants = [
        fitted_constant((*path, "asymptote"), 1 / (curve.per_flop * peak), "ratio", fit.errors),
        fitted_constant((*path, "half"), curve.start / curve.per_flop, "FLOPs", fit.errors),
    ]
    if curve.per_byte:
        bandwidth = fitted_constant((*path, "bandwidth"), 1 / curve.per_byte, "bytes per second", fit.errors)
        exposed = curve.per_byte / device.traffic.per_byte
        note = f"arithmetic hides {1 - exposed:.0%} of the traffic" if exposed < 1 else ""
        constants.append(replace(bandwidth, note=note))
    return constants


def optimizer_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Bytes per second of a fused AdamW step. Points of large models weigh more."""
    optimizer_points = points_of_kind(points, "optimizer")
    longest = max(p.value for p in optimizer_points)
    rows = [FitRow((p.num_bytes,), 0, p.value, p.value / longest) for p in optimizer_points]
    (per_byte,) = fit_coefficients("optimizer", rows, growth=0)
    errors = row_errors(rows, (per_byte,))
    return [fitted_constant(("optimizer", "bandwidth"), 1 / per_byte, "bytes per second", errors)]


def collective_constants(points: Sequence[MeasuredPoint]) -> list[Constant]:
    """Latency and bandwidth of each kind and group size, and defaults that are fitted to all-reduces of all sizes."""
    constants = link_constants(("collective",), "all-reduce", ring_rows(points_of_kind(points, "all-reduce")))
    for kind in COLLECTIVES:
        for ranks in sorted({p.ranks for p in points_of_kind(points, kind)}):
            rows = ring_rows([p for p in points_of_kind(points, kind) if p.ranks == ranks])
            constants += link_constants(("collective", kind, str(ranks)), kind, rows)
    return constants


def ring_rows(points: Sequence[MeasuredPoint]) -> list[FitRow]:
    """Rows of the fit of collectives: columns are 1 and the bytes that a rank sends in a ring."""
    return [
        FitRow((1.0, ring_share(kind, p.ranks) * p.num_bytes), 0, p.value)
        for p in points
        for kind in COLLECTIVES
        if kind == p.kind
    ]


def link_constants(path: tuple[str, ...], kind: str, rows: Sequence[FitRow]) -> list[Constant]:
    """Latency and bandwidth that explain the rows.

    Args:
        kind: named in the error if times do not grow with sizes.
    """
    latency, per_byte = fit_coefficients(kind, rows, growth=1)
    errors = row_errors(rows, (latency, per_byte))
    return [
        fitted_constant((*path, "latency"), latency, "seconds", errors),
        fitted_constant((*path, "bandwidth"), 1 / per_byte, "bytes per second", errors),
    ]


def overlap_constants(
    points: Sequence[MeasuredPoint], device: DeviceCurves, known: Sequence[Constant]
) -> list[Constant]:
    """Overlap efficiency of collectives with the products of linear layers; nothing if no such layers were measured.

    It is the hidden share of the communication that the products are long enough to hide, fitted as
    Σ hidden · hideable / Σ hideable² and limited to 0 … 1.

    Args:
        known: constants of collectives.
    """
    values = {c.path: c.value for c in known}
    pairs = [(p, fused_counterpart(p, points)) for p in points if p.kind == "overlap" and p.case.fusion == "unfused"]
    if not pairs:
        return []
    matmul_points = points_of_kind(points, "matmul", pairs[0][0].dtype)
    curve = compute_curve("matmul", matmul_points, device, hides_traffic=True).curve
    hideable = np.array([hideable_seconds(point, device, curve, values) for point, _ in pairs])
    unfused, fused = (np.array([p.value for p in column]) for column in zip(*pairs, strict=True))
    share = float(np.clip(hideable @ (unfused - fused) / (hideable @ hideable), 0, 1))
    relative = abs((unfused - share * hideable) / fused - 1)
    errors = FitErrors(tuple(relative.tolist()), (True,) * len(pairs), 1)
    return [fitted_constant(("overlap", "layers"), share, "share", errors)]


def fused_counterpart(unfused: MeasuredPoint, points: Sequence[MeasuredPoint]) -> MeasuredPoint:
    """The point of the fused operator that does the work of an unfused point.

    Raises:
        UsageError: it was not measured.
    """
    case = replace(unfused.case, fusion="fused")
    point = next((p for p in points if p.case == case), None)
    if point is None:
        raise UsageError(f"A cost model needs {case.name}, of which there is no measurement. Use --only overlap.")
    return point


def hideable_seconds(
    point: MeasuredPoint, device: DeviceCurves, curve: Curve, values: Mapping[tuple[str, ...], float]
) -> float:
    """Seconds of a layer's collectives that its products are long enough to hide, forward and backward.

    Args:
        curve: of matmuls.
        values: constants of collectives by path.
    """
    operator = point.case.variant
    window, kinds = OVERLAP_WINDOWS[operator](point.ranks), ASYNC_TP_OPS[operator].kinds
    forward, *backward = (device.seconds(op, curve) for op in point.ops[:3])
    comm_seconds = (
        values["collective", kind, str(point.ranks), "latency"]
        + ring_share(kind, point.ranks) * op.num_bytes / values["collective", kind, str(point.ranks), "bandwidth"]
        if kind is not None
        else 0.0
        for kind, op in zip(kinds, point.ops[3:], strict=True)
    )
    window_seconds = window.forward * forward, window.backward * sum(backward)
    return sum(map(min, window_seconds, comm_seconds))
