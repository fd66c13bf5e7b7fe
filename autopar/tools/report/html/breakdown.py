"""The step by activity at each pipeline position."""

from __future__ import annotations

from autopar.ir.units import TIME, percent, text, unit_of
from autopar.tools.explain.advice import ranks_of
from autopar.tools.explain.breakdown import Breakdown
from autopar.tools.report.html.palette import ACTIVITIES
from autopar.tools.report.html.plots import BAR_WIDTH, LEGEND, Figure, axis, hover, layout, row_axis, rows_height

MAX_ROWS = 24


def breakdown_figure(breakdown: Breakdown) -> Figure:
    """A row for each position, or every second, third, …; its parts sum to the step."""
    every = -(-len(breakdown.positions) // MAX_ROWS)
    shown = breakdown.positions[::every]
    unit, unit_seconds = unit_of(breakdown.step_seconds, TIME)
    names = [ranks_of(position) for position in shown]
    traces = []
    for activity, colour in ACTIVITIES.items():
        seconds = [max(0.0, position.spent.by_name[activity]) for position in shown]
        if not any(seconds):
            continue
        lines = [f"{text(s, TIME)}, {percent(s / breakdown.step_seconds)} of the step" for s in seconds]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": activity,
                "x": [s / unit_seconds for s in seconds],
                "y": list(range(len(shown))),
                "width": BAR_WIDTH,
                **hover([[f"{activity} of {name}", line] for name, line in zip(names, lines)]),
                "marker": {"color": colour, "line": {"color": "white", "width": 0.5}},
            }
        )
    some = f" One in {every} of {len(breakdown.positions)} positions is shown." if every > 1 else ""
    return Figure(
        "breakdown",
        f"The step of {text(breakdown.step_seconds, TIME)} by activity, at each pipeline position.",
        traces,
        layout(
            rows_height(len(shown)),
            barmode="stack",
            legend={**LEGEND, "traceorder": "normal"},
            xaxis=axis(f"time, {unit}", range=[0, breakdown.step_seconds / unit_seconds]),
            yaxis=row_axis(names),
        ),
        f"Each row is one step; the bubble is waiting for other stages.{some}",
    )  # fmt: skip
