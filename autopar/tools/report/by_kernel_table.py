"""Printed result of ``autopar bench --by-kernel``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from autopar.ir.text import labelled, numeric, plain_table
from autopar.ir.units import BYTES, plural, signed_percent, text
from autopar.tools.bench.by_kernel import ByKernel
from autopar.tools.bench.kernel_rows import KernelRow, KindRow
from autopar.tools.bench.priced_kernels import PricedKernels
from autopar.tools.bench.priced_ops import PricedOps

MAX_ROWS = 25  # of kernels and of operations
KERNEL_CELLS, OP_CELLS = 64, 40
MIN_SECONDS = 5e-7  # rows of kinds below it on both sides are left out


def by_kernel_parts(result: ByKernel) -> Sequence[RenderableType]:
    """Setting, kinds by difference, the largest kernels, and operations and fused kernels of the highest price."""
    return [
        labelled(setting(result)), "", kinds_table(result), "", kernels_table(result.kernels[:MAX_ROWS]), "",
        ops_table(result.ops[:MAX_ROWS]), "", fused_kernels_table(result.fused_kernels[:MAX_ROWS]),
    ]  # fmt: skip


def setting(result: ByKernel) -> Sequence[tuple[str, str]]:
    """Labelled lines on model, machine, step and peak."""
    error = result.predicted_seconds / result.measured_seconds - 1
    peak_error = result.predicted_bytes / result.measured_bytes - 1
    how = "replayed from a CUDA graph" if result.captured else "not captured as a CUDA graph"
    shape = " × ".join(map(str, result.shape[1:]))
    layout = ", channels_last" if result.channels_last else ""
    return (
        ("model", f"{result.model}, {plural(result.shape[0], 'image')} of {shape}, {result.precision}{layout}"),
        ("plan", result.plan),
        ("machine", result.machine),
        ("cost model", f"{result.hardware}, analytic"),
        ("step", f"{ms(result.predicted_seconds)} ms predicted, {ms(result.measured_seconds)} ms measured, "
         f"{signed_percent(error)}; {how}"),
        ("device", f"{ms(result.busy_seconds)} ms busy, {ms(result.span_seconds)} ms from first to last kernel"),
        ("peak", f"{text(result.predicted_bytes, BYTES)} predicted, {text(result.measured_bytes, BYTES)} measured, "
         f"{signed_percent(peak_error)}"),
    )  # fmt: skip


def kinds_table(result: ByKernel) -> Table:
    """A row per kind and direction, and their sum."""
    table = plain_table("kind", *numeric("priced ms", "measured ms", "difference ms", "of step"))
    rows = [r for r in result.kinds if max(abs(r.priced_seconds), abs(r.measured_seconds)) >= MIN_SECONDS]
    for row in (*rows, KindRow("step", "", result.predicted_seconds, result.measured_seconds)):
        share = row.difference_seconds / result.measured_seconds
        name = f"{row.kind} {row.direction}".rstrip()
        signed = f"{1e3 * row.difference_seconds:+,.3f}"
        table.add_row(name, ms(row.priced_seconds), ms(row.measured_seconds), signed, signed_percent(share))
    return table


def kernels_table(rows: Sequence[KernelRow]) -> Table:
    """A row per kernel name and grid."""
    name = Column("kernel", overflow="fold", max_width=KERNEL_CELLS)
    table = plain_table(name, "kind", *numeric("count", "ms"))
    for row in rows:
        grid = f" {list(row.grid)}" if row.grid else ""
        table.add_row(
            Text(shortened(row.name) + grid), f"{row.kind} {row.direction}", f"{row.count:g}", ms(row.seconds)
        )
    return table


def ops_table(rows: Sequence[PricedOps]) -> Table:
    """A row per target and shapes."""
    name = Column("priced operation", overflow="fold", max_width=OP_CELLS)
    table = plain_table(name, "kind", *numeric("count", "forward ms", "backward ms", "extra ms"))
    for row in rows:
        label = f"{row.target.removeprefix('aten.')} {', '.join(row.operands)}"
        seconds = (row.forward_seconds, row.backward_seconds, row.extra_traffic_seconds)
        table.add_row(Text(label), row.kind, f"{row.count:,}", *map(ms, seconds))
    return table


def fused_kernels_table(rows: Sequence[PricedKernels]) -> Table:
    """A row per operations and sizes."""
    name = Column("priced fused kernel", overflow="fold", max_width=KERNEL_CELLS)
    table = plain_table(name, "kind", *numeric("count", "ms"))
    for row in rows:
        table.add_row(Text(row.name), f"memory {row.direction}", f"{row.count:,}", ms(row.seconds))
    return table


def ms(seconds: float) -> str:
    """Milliseconds with three decimals."""
    return f"{1e3 * seconds:,.3f}"


def shortened(name: str) -> str:
    """A kernel's name without its return type, cut to two lines."""
    name = name.removeprefix("void ")
    return name if len(name) <= 2 * KERNEL_CELLS else f"{name[: 2 * KERNEL_CELLS - 1]}…"
