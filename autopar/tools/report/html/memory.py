"""Memory of ranks over a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.ir.units import BYTES, TIME, percent, plural, text, unit_of
from autopar.tools.bench.row import BenchRow
from autopar.tools.report.html.palette import ALERT, position_colour
from autopar.tools.report.html.plots import Figure, axis, hover, layout
from autopar.tools.report.simulation_picture import CAPACITY_SHARE, MAX_CURVES
from autopar.tools.report.step_bars import shown_positions, some_text
from autopar.tools.simulate.step import Position, SimulatedStep

HEIGHT = 380


def memory_figure(step: SimulatedStep, row: BenchRow | None) -> Figure | None:
    """A curve for each position, or some of them; None if the plan has no memory figures of its stages.

    Args:
        row: measured peaks, if there are any.
    """
    if any(position.memory is None for position in step.positions):
        return None
    capacity = step.plan.hardware.memory_bytes
    peaks = [curve.peak_bytes for position in step.positions if (curve := position.memory) is not None]
    shows_capacity = max(peaks) >= CAPACITY_SHARE * capacity
    unit, unit_bytes = unit_of(max(capacity if shows_capacity else 0, *peaks), BYTES)
    time_unit, unit_seconds = unit_of(step.step_seconds, TIME)
    shown = shown_positions(step.positions, MAX_CURVES)
    traces = [curve_of(step, position, unit_seconds, unit_bytes) for position in shown]
    if row is not None:
        traces.append(measured_peaks(step, shown, row, unit_seconds, unit_bytes))
    if shows_capacity:
        traces.append(capacity_line(step, capacity, unit_seconds, unit_bytes))
    share = f" The peak is {percent(max(peaks) / capacity, 0)} of a device's {text(capacity, BYTES)}."
    diamonds = " Diamonds are measured peaks." if row is not None else ""
    return Figure(
        "memory",
        f"Memory over a step of {plural(len(shown), 'position')}, at most {text(max(peaks), BYTES)}.",
        traces,
        layout(
            HEIGHT,
            showlegend=True,
            xaxis=axis(f"time, {time_unit}", range=[0, 1.02 * step.step_seconds / unit_seconds]),
            yaxis=axis(f"memory of a rank, {unit}", rangemode="tozero"),
        ),
        "Predicted memory of a rank: weights and optimizer state all the time, activations from forward to backward."
        f"{share}{diamonds}{some_text(shown, step.positions)}",
    )


def curve_of(step: SimulatedStep, position: Position, unit_seconds: float, unit_bytes: float) -> Mapping[str, Any]:
    """A position's memory as a step function."""
    assert position.memory is not None
    ends = [*position.memory.seconds, step.step_seconds]
    held = [*position.memory.num_bytes, position.memory.num_bytes[-1]]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": position.name,
        "x": [round(t / unit_seconds, 6) for t in ends],
        "y": [round(n / unit_bytes, 4) for n in held],
        "line": {
            "shape": "hv",
            "width": 2,
            "color": position_colour(step.positions.index(position), len(step.positions)),
        },
        **hover([[position.name, f"{text(n, BYTES)} at {text(t, TIME)}"] for t, n in zip(ends, held)]),
    }


def measured_peaks(
    step: SimulatedStep, shown: list[Position], row: BenchRow, unit_seconds: float, unit_bytes: float
) -> Mapping[str, Any]:
    """A mark at the end of the step for the measured peak of each position's fullest rank."""
    measured = row.pipeline.tensor_bytes if row.pipeline is not None and row.pipeline.tensor_bytes else row.peak_bytes
    peaks = [max(measured[rank] for rank in position.ranks) for position in shown]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "measured peak",
        "x": [step.step_seconds / unit_seconds] * len(shown),
        "y": [peak / unit_bytes for peak in peaks],
        "marker": {
            "symbol": "diamond",
            "size": 11,
            "color": [position_colour(step.positions.index(p), len(step.positions)) for p in shown],
            "line": {"color": "white", "width": 1},
        },
        "cliponaxis": False,
        **hover([[position.name, f"measured peak {text(peak, BYTES)}"] for position, peak in zip(shown, peaks)]),
    }


def capacity_line(step: SimulatedStep, capacity: int, unit_seconds: float, unit_bytes: float) -> Mapping[str, Any]:
    """The memory of a device."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"capacity {text(capacity, BYTES)}",
        "x": [0, step.step_seconds / unit_seconds],
        "y": [capacity / unit_bytes] * 2,
        "line": {"color": ALERT, "dash": "dash", "width": 2},
        "hoverinfo": "skip",
    }
