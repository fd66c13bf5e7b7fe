"""Timeline of a step: the actions of each pipeline position, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.units import TIME, plural, text, unit_of
from autopar.tools.bench.timeline import MeasuredTimeline
from autopar.tools.report.html.palette import IDLE, css_of
from autopar.tools.report.html.plots import BAR_WIDTH, Figure, axis, hover, layout, row_axis, rows_height
from autopar.tools.report.step_bars import COLOURS, Bar, bars, shade, shown_positions, some_text
from autopar.tools.simulate.step import Position, SimulatedStep

MAX_ROWS, MAX_BARS, MAX_LABELLED = 24, 6000, 900
MEASURED_END = "reduction and update"  # measured together
ENDS = ("reduction", "optimizer", MEASURED_END)  # of all chunks
KINDS: Mapping[str, str] = {**COLOURS, MEASURED_END: "#8a949c"}
MEASURED_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}


@dataclass(frozen=True)
class Row:
    """A row of the timeline: its name, its bars, the stage of each chunk, and when it ends."""

    name: str
    bars: Sequence[Bar]
    stages: tuple[int, ...]
    end_seconds: float


def timeline_figure(step: SimulatedStep, measured: MeasuredTimeline | None) -> Figure:
    """A row for each position, and below it the measured one if there is one."""
    num_bars = max(len(bars(step, position)) for position in step.positions) * (1 if measured is None else 2)
    shown = shown_positions(step.positions, max(1, min(MAX_ROWS, MAX_BARS // num_bars)))
    rows = [row for position in shown for row in rows_of(step, position, measured)]
    end = max(row.end_seconds for row in rows)
    unit, unit_seconds = unit_of(end, TIME)
    labelled = sum(len(row.bars) for row in rows) <= MAX_LABELLED
    kinds = [kind for kind in KINDS if any(bar.kind == kind for row in rows for bar in row.bars)]
    numbers = " Numbers are microbatches." if labelled else ""
    paler = " Paler bars are a rank's earlier chunks." if step.plan.chunks > 1 else ""
    below = " Below each predicted row is the measured one, of the position's busiest rank." if measured else ""
    return Figure(
        "timeline",
        f"Timeline of a step of {text(step.step_seconds, TIME)}: the actions of {plural(len(shown), 'position')}.",
        [waiting(rows, unit_seconds), *(trace(rows, kind, step.plan.chunks, unit_seconds, labelled) for kind in kinds)],
        layout(
            rows_height(len(rows)),
            barmode="overlay",
            uniformtext={"mode": "hide", "minsize": 10},
            xaxis=axis(f"time, {unit}", range=[0, end / unit_seconds]),
            yaxis=row_axis([row.name for row in rows]),
        ),
        f"Where a row is pale grey, its ranks wait.{numbers}{paler}{below}{some_text(shown, step.positions)}",
    )  # fmt: skip


def rows_of(step: SimulatedStep, position: Position, measured: MeasuredTimeline | None) -> Sequence[Row]:
    """Rows of a position: predicted, then measured."""
    predicted = Row(position.name, bars(step, position), position.stages, step.step_seconds)
    if measured is None:
        return [predicted]
    rank = max(position.ranks, key=lambda rank: sum(s.end_seconds - s.start_seconds for s in measured.of_rank(rank)))
    spans, pp = measured.of_rank(rank), step.plan.mesh.pp
    found = [
        Bar(MEASURED_KINDS[s.action.kind], s.start_seconds, s.end_seconds, s.action.chunk // pp,
            str(s.action.microbatch))
        for s in spans
    ]  # fmt: skip
    idle = measured.idle_seconds[rank]
    last = max((span.end_seconds for span in spans), default=measured.called_seconds[rank])
    found += [Bar(MEASURED_END, last, idle)] if idle > last else []
    return [predicted, Row("measured", found, position.stages, idle)]


def waiting(rows: Sequence[Row], unit_seconds: float) -> Mapping[str, Any]:
    """Bars from the start to the end of the step, behind all others."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": "waiting",
        "x": [row.end_seconds / unit_seconds for row in rows],
        "y": list(range(len(rows))),
        "width": BAR_WIDTH,
        "marker": {"color": IDLE, "line": {"width": 0}},
        "hoverinfo": "skip",
    }


def trace(rows: Sequence[Row], kind: str, chunks: int, unit_seconds: float, labelled: bool) -> Mapping[str, Any]:
    """Bars of one kind in all rows, with their microbatches if ``labelled``."""
    own = [(number, row, bar) for number, row in enumerate(rows) for bar in row.bars if bar.kind == kind]
    own.sort(key=lambda item: -item[2].chunk)  # the legend has the colour of the first bar: not a pale one
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "x": [(bar.end_seconds - bar.start_seconds) / unit_seconds for _, _, bar in own],
        "base": [bar.start_seconds / unit_seconds for _, _, bar in own],
        "y": [number for number, _, _ in own],
        "width": BAR_WIDTH,
        "text": [bar.label for _, _, bar in own],
        "textposition": "inside" if labelled else "none",
        "insidetextanchor": "middle",
        "textangle": 0,
        **hover([hover_lines(row, bar) for _, row, bar in own]),
        "marker": {
            "color": KINDS[kind] if kind in ENDS else [css_of(shade(KINDS[kind], b.chunk, chunks)) for _, _, b in own],
            "line": {"color": "white", "width": 0.5 if labelled else 0},
        },
    }


def hover_lines(row: Row, bar: Bar) -> list[str]:
    """Lines about a bar."""
    of = f" of microbatch {bar.label}, stage {row.stages[bar.chunk]}" if bar.label else ""
    seconds = bar.end_seconds - bar.start_seconds
    return [f"{bar.kind}{of}", f"{text(seconds, TIME)}, from {text(bar.start_seconds, TIME)} on"]
