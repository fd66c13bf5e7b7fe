"""Picture of a bench result: one bar per baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.ir.units import percent
from autopar.tools.bench.result import BenchResult
from autopar.tools.report.figure import needed_figure

OWN, PEERS, PLAIN = "#1b6ca8", "#b9c4cc", "#8a949c"
BAR_INCHES, MARGIN_INCHES, WIDTH_INCHES = 0.42, 1.5, 9.0


def figure_of(result: BenchResult) -> Any:
    """Matplotlib figure of a bench result."""
    rows = result.best
    figure = needed_figure()(figsize=(WIDTH_INCHES, MARGIN_INCHES + BAR_INCHES * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    rates = [row.samples_per_second or 0.0 for row in rows]
    colours = [
        OWN if row.contestant in ("autopar", "uniform") else PLAIN if row.devices == 1 else PEERS for row in rows
    ]
    places = range(len(rows))
    axes.barh(places, rates, color=colours, height=0.7)
    bounds = [result.batch / row.pipeline.bound_seconds if row.pipeline else 0.0 for row in rows]
    marked = [i for i in places if bounds[i] and rows[i].devices > 1]
    if marked:
        axes.scatter(
            [bounds[i] for i in marked], marked, marker="|", s=330, color="#c23b22", linewidths=2, label="bubble bound",
            zorder=3,
        )  # fmt: skip
        figure.legend(loc="outside lower right", frameon=False, markerscale=0.6, fontsize=8.5)
    right = max([*rates, *bounds, 1e-9])
    gap, texts = 0.012 * right, {}
    for i, row in enumerate(rows):
        if row.samples_per_second is None:
            reason = row.reason or ""
            axes.text(0.01 * right, i, reason if len(reason) <= 90 else f"{reason[:89]}…", va="center", fontsize=7.5)
            continue
        of_bound = f", {percent(row.of_bound)} of its bound" if row.of_bound is not None and i in marked else ""
        texts[i] = axes.text(
            rates[i] + gap, i,
            f"{row.samples_per_second:,.{0 if rates[i] >= 100 else 1}f}{of_bound}",
            va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_xlim(0, 1.32 * right)
    labels = [f"{row.title}\n{row.label}" if row.label else row.title for row in rows]
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("samples/s")
    axes.xaxis.set_major_formatter("{x:,.10g}")  # 12,000, and 0.5 where nothing is faster
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{result.model}, batch {result.batch:,}, {result.precision}\n{result.machine}", fontsize=9.5, loc="left"
    )
    beside_marks(figure, axes, {texts[i]: bounds[i] for i in marked if i in texts}, gap)
    return figure


def beside_marks(figure: Any, axes: Any, marks: Mapping[Any, float], gap: float) -> None:
    """Move texts that overlap their marks to the right of them. The widths of texts are known only after layout."""
    figure.draw_without_rendering()
    for text, mark in marks.items():
        begins = text.get_position()[0]
        ends = axes.transData.inverted().transform(text.get_window_extent())[1][0]
        if begins - gap < mark < ends + gap:
            text.set_x(mark + gap)
