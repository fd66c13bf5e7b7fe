"""Picture of a simulated step: the actions of every position over time, above their memory."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any

from autopar.ir.table import batch_text, precision_text
from autopar.ir.units import BYTES, TIME, percent, text, unit_of
from autopar.tools.report.figure import needed_figure
from autopar.tools.report.step_bars import COLOURS, Bar, bars, shade, shown_positions
from autopar.tools.simulate.step import SimulatedStep

WIDTH_INCHES, MARGIN_INCHES, MEMORY_INCHES = 14.0, 1.6, 2.6
ROW_INCHES, MAX_ROWS_INCHES = 0.34, 8.0
LETTER_INCHES, LETTER_POINTS, MIN_POINTS = 0.058, 6.5, 4.5
OUTLINED_INCHES = 0.03  # narrower bars have no outline, which would hide them
MAX_NAMES = 32  # names of rows
MAX_CURVES = 10
CAPACITY_SHARE = 0.4  # the axis includes the capacity if the peak is at least this share of it
LIGHTEST = 0.88  # end of the used palette; the rest is a yellow that is hard to see on white


def figure_of(step: SimulatedStep) -> Any:
    """Matplotlib figure of a simulated step."""
    rows = [bars(step, position) for position in step.positions]
    rows_inches = min(MAX_ROWS_INCHES, ROW_INCHES * max(len(rows), 2))
    held = all(position.memory is not None for position in step.positions)
    heights = [rows_inches, MEMORY_INCHES] if held else [rows_inches]
    figure = needed_figure()(figsize=(WIDTH_INCHES, sum(heights) + MARGIN_INCHES), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    name, size = unit_of(step.step_seconds, TIME)
    per_inch = step.step_seconds / size / (0.9 * WIDTH_INCHES)  # time units per inch of the panel
    draw_rows(panels[0], step, rows, size, per_inch)
    if held:
        draw_memory(panels[1], step, size)
    panels[-1].set_xlabel(f"time, {name}")
    panels[-1].set_xlim(0, step.step_seconds / size or 1.0)
    panels[0].set_title(heading(step), fontsize=9.5, loc="left")
    return figure


def heading(step: SimulatedStep) -> str:
    plan = step.plan
    return (
        f"{plan.model.name}, batch {batch_text(plan)}, {plan.mesh}, {precision_text(plan)}, {plan.hardware.device}\n"
        f"{step.schedule}{f', {plan.chunks} chunks a rank (pale to dark)' if plan.chunks > 1 else ''}: simulated step "
        f"{text(step.step_seconds, TIME)}, bubble {percent(step.bubble_fraction)}"
    )


def draw_rows(panel: Any, step: SimulatedStep, rows: Sequence[Sequence[Bar]], size: float, per_inch: float) -> None:
    """Draw a row per position, with labels where they fit."""
    chunks, row_inches = step.plan.chunks, min(MAX_ROWS_INCHES / len(rows), ROW_INCHES)
    points = min(LETTER_POINTS, 72 * 0.55 * row_inches)
    letter = LETTER_INCHES * points / LETTER_POINTS * per_inch
    for place, row in enumerate(rows):
        groups: dict[tuple[str, int], list[Bar]] = {}
        for bar in row:
            groups.setdefault((bar.kind, bar.chunk), []).append(bar)
        for (kind, chunk), alike in groups.items():
            spans = [(bar.start_seconds / size, (bar.end_seconds - bar.start_seconds) / size) for bar in alike]
            wide = min(width for _, width in spans) > OUTLINED_INCHES * per_inch
            panel.broken_barh(
                spans, (place - 0.43, 0.86),
                facecolors=shade(COLOURS[kind], chunk, chunks), edgecolors="white", linewidth=0.4 if wide else 0,
            )  # fmt: skip
            letters = max(len(bar.label) for bar in alike)  # all bars get labels or none, but for a smaller last one
            for bar, (left, width) in zip(alike, spans, strict=True) if letters and points >= MIN_POINTS else ():
                if width > (letters + 0.6) * letter:
                    panel.text(left + width / 2, place, bar.label, ha="center", va="center", fontsize=points)
    every = -(-len(rows) // MAX_NAMES)
    named = range(0, len(rows), every)
    panel.set_yticks(list(named), [step.positions[i].name for i in named], fontsize=8 if every == 1 else 7)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.spines[["top", "right"]].set_visible(False)
    draw_legend(panel, {bar.kind for row in rows for bar in row})


def draw_legend(panel: Any, kinds: Collection[str]) -> None:
    """Draw the legend of the colours above the rows on the right."""
    for kind in (kind for kind in COLOURS if kind in kinds):
        panel.broken_barh([], (0, 0), facecolors=COLOURS[kind], label=kind)
    panel.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(COLOURS), frameon=False, fontsize=8.5,
        borderaxespad=0.2, handlelength=1.4,
    )  # fmt: skip


def draw_memory(panel: Any, step: SimulatedStep, size: float) -> None:
    """Draw a memory curve per position, or of some positions and the fullest one, and the capacity of a device."""
    curves = {position.name: position.memory for position in step.positions if position.memory is not None}
    capacity = step.plan.hardware.memory_bytes
    peak = max(curve.peak_bytes for curve in curves.values())
    shown = {position.name for position in shown_positions(step.positions, MAX_CURVES)}
    shows_capacity = peak >= CAPACITY_SHARE * capacity
    unit, unit_bytes = unit_of(capacity if shows_capacity else peak, BYTES)
    palette = importlib.import_module("matplotlib").colormaps["viridis"]
    for place, (name, curve) in enumerate(curves.items()):
        if name not in shown:
            continue
        panel.step(
            [*(t / size for t in curve.seconds), step.step_seconds / size],
            [n / unit_bytes for n in (*curve.num_bytes, curve.num_bytes[-1])],
            where="post", linewidth=1.0, color=palette(LIGHTEST * place / max(1, len(curves) - 1)), label=name,
        )  # fmt: skip
    words = f"capacity {text(capacity, BYTES)}"
    if shows_capacity:
        panel.axhline(capacity / unit_bytes, color="#c23b22", linestyle="--", linewidth=1.2)
        panel.annotate(
            words, (0.005, capacity / unit_bytes), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", color="#c23b22", fontsize=8,
        )  # fmt: skip
    else:
        panel.annotate(
            f"↑ {words}, {percent(peak / capacity, 0)} of it needed", (0.005, 0.93), xycoords="axes fraction",
            color="#c23b22", fontsize=8,
        )  # fmt: skip
    panel.set_ylim(0, 1.12 * max(peak, capacity if shows_capacity else 0) / unit_bytes)
    panel.set_ylabel(f"memory of a rank, {unit}")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8,
        title=f"some of {len(curves)} positions,\nthe fullest included" if len(shown) < len(curves) else None,
        title_fontsize=8,
    )  # fmt: skip
