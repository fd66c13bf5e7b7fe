"""Printed result of ``autopar bench --calibrate``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from autopar.ir.text import labelled, numeric, plain_table
from autopar.ir.units import BYTES, TIME, signed_percent, text
from autopar.tools.bench.calibration import Calibration, summary
from autopar.tools.report.bench_table import INDENT, NAME_CELLS


def calibration_parts(calibration: Calibration) -> Sequence[RenderableType]:
    """Machine and cost model, a row per plan, and a summary of the errors."""
    head = (
        ("machine", calibration.machine),
        ("cost model", f"{calibration.hardware}, {calibration.cost}"),
        ("peaks", calibration.memory),
    )
    return [labelled(head), "", points_table(calibration), "", labelled(summary(calibration))]


def points_table(calibration: Calibration) -> Table:
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
