"""Picture of a calibration: predicted against measured step times and peaks of all plans."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.mesh import Mesh
from autopar.ir.units import percent
from autopar.tools.bench.calibration import Calibration
from autopar.tools.bench.calibration_point import CalibrationPoint, ErrorBand
from autopar.tools.report.figure import needed_figure

Pair = tuple[float, float]  # measured, predicted

NEAR = 0.1  # relative width of the band around equality
SIZE_INCHES = (9.6, 4.8)
COLOURS = {"pipeline": "#1b6ca8", "tensor": "#c2731d", "data": "#3c8f4f", "mixed": "#8c4fa0", "one device": "#6b747c"}


def kind_of(mesh: Mesh) -> str:
    """Kind of parallelism of a mesh, a key of `COLOURS`."""
    axes = [name for name, size in (("pipeline", mesh.pp), ("tensor", mesh.tp), ("data", mesh.dp)) if size > 1]
    return axes[0] if len(axes) == 1 else "mixed" if axes else "one device"


def figure_of(calibration: Calibration) -> Any:
    """Matplotlib figure of a calibration."""
    figure = needed_figure()(figsize=SIZE_INCHES, layout="constrained")
    times, peaks = figure.subplots(1, 2)
    largest = max(max(point.measured_bytes) for point in calibration.points)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    scatter(times, calibration.points, lambda p: [(1e3 * p.measured_seconds, 1e3 * p.predicted_seconds)])
    labelled(times, "step, ms", calibration.time)
    scatter(peaks, calibration.points, lambda p: peaks_of(p, size))
    labelled(peaks, f"peak memory of a rank, {unit}", calibration.peaks)
    handles, names = times.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8.5)
    figure.suptitle(f"{calibration.machine}\ncost model {calibration.hardware}", fontsize=9.5, x=0.01, ha="left")
    return figure


def peaks_of(point: CalibrationPoint, size: int) -> list[Pair]:
    """Measured and predicted peak of each rank, in units of so many bytes."""
    return [(m / size, p / size) for m, p in zip(point.measured_bytes, point.predicted_bytes, strict=True)]


def scatter(axes: Any, points: Sequence[CalibrationPoint], pairs: Callable[[CalibrationPoint], Sequence[Pair]]) -> None:
    """Marks of all plans, one colour for each kind of mesh, and the line of equality with its band."""
    for kind, colour in COLOURS.items():
        marks = [pair for point in points if kind_of(point.mesh) == kind for pair in pairs(point)]
        if marks:
            axes.scatter(*zip(*marks), s=26, color=colour, alpha=0.85, linewidths=0, label=kind, zorder=3)
    every = [x for point in points for pair in pairs(point) for x in pair]
    ends = [min(every) / 1.6, max(every) * 1.6]
    axes.plot(ends, ends, color="#222222", linewidth=0.8, zorder=2)
    axes.fill_between(
        ends, [(1 - NEAR) * x for x in ends], [(1 + NEAR) * x for x in ends], color="#222222", alpha=0.12,
        label=f"± {percent(NEAR, 0)}", zorder=1,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")


def labelled(axes: Any, what: str, band: ErrorBand) -> None:
    axes.set_title(f"{what}: median error {percent(band.median)}, worst {percent(band.worst)}", fontsize=9)
    axes.set(xlabel="measured", ylabel="predicted")
    ticker = importlib.import_module("matplotlib.ticker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:,.10g}")
        axis.set_minor_formatter("")
    axes.spines[["top", "right"]].set_visible(False)
