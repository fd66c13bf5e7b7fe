"""The printed result of ``autopar bench``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from autopar.bench import BenchResult
from autopar.ir.text import labelled, plain_table
from autopar.ir.units import BYTES, TIME, percent, plural, text


def bench_parts(model: str, result: BenchResult) -> Sequence[RenderableType]:
    """What was measured, the times, and the memory of each rank."""
    lines = [
        ("model", model),
        ("batch", f"{result.batch:,} in {plural(result.microbatches, 'microbatch', 'es')}"),
        ("machine", result.machine),
    ]
    return [labelled(lines), "", time_table(result), "", memory_table(result)]


def time_table(result: BenchResult) -> Table:
    """Median step times, each compared with what it should equal."""
    table = plain_table()
    table.add_column("run")
    for title in ("step", "samples/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("compared", no_wrap=True)
    overhead = result.single_seconds / result.plain_seconds - 1
    rows = [
        ("plain PyTorch loop, one device", result.plain_seconds, ""),
        ("autopar, one device", result.single_seconds, f"{100 * overhead:+.1f} % time against the plain loop"),
        (f"bubble bound, {plural(result.devices, 'device')}", result.bound_seconds, "measured actions, free transfers"),
        (
            f"autopar, {plural(result.devices, 'device')}",
            result.step_seconds,
            f"{percent(result.of_bound)} of its bound",
        ),
    ]
    for run, seconds, compared in rows:
        table.add_row(run, text(seconds, TIME), f"{result.batch / seconds:,.1f}", compared)
    return table


def memory_table(result: BenchResult) -> Table:
    """Predicted and measured peak memory of each rank."""
    table = plain_table()
    for title in ("rank", "predicted peak", "in tensors", "against prediction", "of the process"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.memory:
        error = row.tensor_bytes / row.predicted_bytes - 1
        table.add_row(
            str(row.rank),
            text(row.predicted_bytes, BYTES),
            text(row.tensor_bytes, BYTES),
            f"{100 * error:+.1f} %",
            text(row.resident_bytes, BYTES),
        )
    return table
