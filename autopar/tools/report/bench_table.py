"""Printed result of ``autopar bench``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from autopar.ir.text import NONE, labelled, numeric, plain_table
from autopar.ir.units import BYTES, TIME, percent, plural, signed_percent, text
from autopar.tools.bench.calibration_point import CalibrationView
from autopar.tools.bench.row import BenchRow, BenchView

INDENT = 2  # columns before the lines below a run's name
NAME_CELLS = 46


def bench_parts(result: BenchView) -> Sequence[RenderableType]:
    """Setting of the measurement, a row per baseline, the plans' bubbles, and memory rank by rank."""
    precision = f"{result.precision}{', channels_last' if result.channels_last else ''}"
    lines = [
        ("model", f"{result.model}, {result.flops_per_image / 1e9:,.1f} GFLOP to train on an image"),
        ("batch", f"{plural(result.batch, 'image')} of {' × '.join(map(str, result.shape[1:]))}, {precision}"),
        ("plan", result.plan),
        ("machine", result.machine),
        ("measured", f"medians of {plural(result.steps, 'step')} after {result.warmup}, the slowest rank's time"),
    ]
    parts = [labelled(lines), "", rate_table(result)]
    planned = [row for row in result.best if row.pipeline is not None]
    if planned:
        parts += ["", bubble_table(planned)]
    for row in planned:
        if row.contestant == "autopar":
            parts += ["", memory_table(row, result.memory)]
    return parts


def rate_table(result: BenchView) -> Table:
    """A row per baseline: its best variant, or the reason why it has none."""
    titles = ("first step", "step", "samples/s", "TFLOP/s per device", "peak memory")
    table = plain_table(Column("run", overflow="fold", max_width=NAME_CELLS), *numeric(*titles, overflow="fold"))
    fastest = max((row.samples_per_second or 0.0 for row in result.best if row.devices > 1), default=0.0)
    for row in result.best:
        lines: list[RenderableType] = [Text(row.title, style="bold" if row.contestant == "autopar" else "")]
        lines += [Padding.indent(Text(part, style="dim"), INDENT) for part in (row.label, row.note) if part]
        if row.median_seconds is None or row.samples_per_second is None or row.tflops_per_device is None:
            lines.append(Padding.indent(Text(row.reason or "", style="yellow"), INDENT))
            table.add_row(Group(*lines), *[NONE] * len(titles))
            continue
        rate = Text(f"{row.samples_per_second:,.1f}", style="green" if row.samples_per_second == fastest else "")
        flops = f"{row.tflops_per_device:,.{3 if row.tflops_per_device < 1 else 1}f}"
        first = text(row.first_step_seconds, TIME) if row.first_step_seconds else NONE
        table.add_row(
            Group(*lines), first, text(row.median_seconds, TIME), rate, flops, text(max(row.peak_bytes), BYTES)
        )
    return table


def bubble_table(rows: Sequence[BenchRow]) -> Table:
    """Predicted and measured step and bubble of the baselines that run plans."""
    titles = ("predicted step", "measured", "bubble predicted", "measured", "bubble bound", "of bound")
    table = plain_table("run", *numeric(*titles, overflow="fold"))
    for row in rows:
        assert row.pipeline is not None and row.median_seconds is not None and row.of_bound is not None
        table.add_row(
            row.title,
            text(row.pipeline.predicted_seconds, TIME),
            text(row.median_seconds, TIME),
            percent(row.pipeline.bubble_predicted),
            percent(row.pipeline.bubble_measured),
            text(row.pipeline.bound_seconds, TIME),
            percent(row.of_bound),
        )
    return table


def memory_table(row: BenchRow, memory: str) -> Table:
    """Predicted and measured peak memory of each rank of the plan."""
    assert row.pipeline is not None
    counted = row.pipeline.tensor_bytes
    titles = ("rank", "predicted peak", *(["in tensors"] if counted else []), memory, "against prediction")
    table = plain_table(*numeric(*titles, overflow="fold"))
    for rank, peak in enumerate(row.peak_bytes):
        predicted = row.pipeline.predicted_bytes[rank]
        compared = counted[rank] if counted else peak
        table.add_row(
            str(rank),
            text(predicted, BYTES),
            *([text(counted[rank], BYTES)] if counted else []),
            text(peak, BYTES),
            signed_percent(compared / predicted - 1),
        )
    return table


def calibration_parts(calibration: CalibrationView) -> Sequence[RenderableType]:
    """Machine and cost model, a row per plan, and a summary of the errors."""
    head = (
        ("machine", calibration.machine),
        ("cost model", f"{calibration.hardware}, {calibration.cost}"),
        ("peaks", calibration.memory),
    )
    return [labelled(head), "", points_table(calibration), "", labelled(summary(calibration))]


def points_table(calibration: CalibrationView) -> Table:
    """A row per plan: its step and its fullest rank, predicted and measured."""
    titles = ("predicted step", "measured", "error", "predicted peak", "measured", "worst rank")
    plan = Column("model, batch, plan", overflow="fold", max_width=NAME_CELLS)
    table = plain_table(plan, *numeric(*titles, overflow="fold"))
    for point in calibration.points:
        table.add_row(
            Group(f"{point.model}, {point.batch:,}", Padding.indent(Text(point.plan, style="dim"), INDENT)),
            text(point.predicted_seconds, TIME),
            text(point.measured_seconds, TIME),
            signed_percent(point.time_error),
            text(max(point.predicted_bytes), BYTES),
            text(max(point.measured_bytes), BYTES),
            signed_percent(max(point.memory_errors, key=abs)),
        )
    return table


def summary(calibration: CalibrationView) -> Sequence[tuple[str, str]]:
    """The errors of step times and of peaks, in words."""
    plans = plural(len(calibration.points), "plan")
    ranks = plural(sum(len(point.predicted_bytes) for point in calibration.points), "rank")
    time, peaks = calibration.time, calibration.peaks
    return (
        ("time", f"median {percent(time.median)}, worst {percent(time.worst)} of {plans}"),
        ("memory", f"median {percent(peaks.median)}, worst {percent(peaks.worst)} of {ranks}"),
    )
