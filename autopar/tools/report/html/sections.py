"""Sections of a report: texts, tables and figures in reading order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from autopar.ir.html import WIDTH
from autopar.ir.plan import Plan
from autopar.ir.sharding_table import sharding_parts
from autopar.ir.table import alternative_table, footer, header, stage_table
from autopar.ir.units import BYTES, TIME, percent, text
from autopar.solve.result.step_breakdown import NOTABLE
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.row import BenchRow
from autopar.tools.explain.advice import Explanation, explained
from autopar.tools.explain.why_not_result import WhyNotResult
from autopar.tools.report.bench_table import bench_parts
from autopar.tools.report.explain_table import (
    answer_parts,
    help_table,
    memory_notes,
    memory_table,
    time_table,
    units_note,
)
from autopar.tools.report.html.alternatives import alternatives_figure
from autopar.tools.report.html.breakdown import breakdown_figure
from autopar.tools.report.html.memory import memory_figure
from autopar.tools.report.html.model_picture import blocks_of, model_figure
from autopar.tools.report.html.plots import Figure
from autopar.tools.report.html.timeline import timeline_figure
from autopar.tools.report.simulate_table import notes, position_table
from autopar.tools.simulate.step import SimulatedStep, simulate_plan

LONG_TABLE = 16  # rows from which a table is closed at first


@dataclass(frozen=True)
class Details:
    """A table that is closed at first."""

    summary: str
    table: RenderableType


Part = RenderableType | Figure | Details


@dataclass(frozen=True)
class Section:
    """A section with an id, a heading, and texts, tables and figures."""

    name: str
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Measured:
    """A bench of the plan, and the row that ran it."""

    result: BenchResult
    row: BenchRow


@dataclass(frozen=True)
class ReportInput:
    """Everything that a report shows."""

    plan: Plan
    step: SimulatedStep
    explanation: Explanation
    measured: Measured | None = None
    answers: tuple[WhyNotResult, ...] = ()

    @staticmethod
    def of(plan: Plan, measured: Measured | None, answers: tuple[WhyNotResult, ...]) -> ReportInput:
        """Report of a plan, a bench of it and questions about it."""
        return ReportInput(plan, simulate_plan(plan), explained(plan), measured, answers)


def key_figures(report: ReportInput) -> Iterator[tuple[str, str]]:
    """Number and name of what matters most: step, rate, memory, bubble."""
    prediction, capacity = report.plan.prediction, report.plan.hardware.memory_bytes
    band, peak = f" ±{percent(prediction.error, 0)}" if prediction.error else "", max(prediction.peak_bytes)
    yield f"{text(prediction.step_seconds, TIME)}{band}", "predicted step"
    if report.measured is not None and report.measured.row.median_seconds is not None:
        yield text(report.measured.row.median_seconds, TIME), "measured step"
    yield f"{prediction.samples_per_second:,.1f}{band}", "samples per second"
    yield f"{text(peak, BYTES)}, {percent(peak / capacity, 0)}", "memory of the fullest rank"
    yield percent(prediction.bubble_fraction), "bubble"


def sections(report: ReportInput) -> list[Section]:
    """The sections of a report; those of a bench and of questions only where there are any."""
    plan, row = report.plan, report.measured.row if report.measured is not None else None
    found = [
        Section("plan", "The plan", [header(plan), footer(plan)]),
        Section("model-section", "The model on its ranks", model_parts(plan)),
        Section("timeline-section", "The step over time", timeline_parts(report.step, row)),
        Section("memory-section", "Memory over time", memory_parts(report, row)),
        Section("bound", "What bounds the step", bound_parts(report.explanation)),
        Section("alternatives-section", "Alternatives", alternative_parts(plan, report.answers)),
    ]
    if report.answers:
        parts = [part for answer in report.answers for part in answer_parts(plan, report.explanation.breakdown, answer)]
        found.append(Section("why-not", "Why not …", parts))
    if report.measured is not None:
        found.append(Section("measured", "Measured", bench_parts(report.measured.result)))
    return found


def model_parts(plan: Plan) -> Sequence[Part]:
    """Picture of the model, its stages and their shardings."""
    parts: list[Part] = [model_figure(plan)]
    if not blocks_of(plan):
        reason = "were changed after the plan was made" if plan.block_costs else "are not in this plan file"
        parts.append(f"Times of the model's blocks {reason}: each bar is a stage. `autopar plan … -o` writes them.")
    parts.append(opened("Stages", stage_table(plan, WIDTH), len(plan.stages)))
    return [*parts, *(sharding_parts(plan) if plan.blocks else [])]


def timeline_parts(step: SimulatedStep, row: BenchRow | None) -> Sequence[Part]:
    """Timeline, notes on contradictions, and a row for each position."""
    measured = row.pipeline.timeline if row is not None and row.pipeline is not None else None
    parts: list[Part] = [timeline_figure(step, measured)]
    if row is not None and measured is None:
        parts.append("The bench file has no measured timeline: an older version wrote it. Run `autopar bench` again.")
    parts += [f"{label}: {note}" for label, note in notes(step, step)]
    return [*parts, opened("Positions", position_table(step, WIDTH), len(step.positions))]


def memory_parts(report: ReportInput, row: BenchRow | None) -> Sequence[Part]:
    """Curves of memory, and each position's peak by kind."""
    figure, breakdown = memory_figure(report.step, row), report.explanation.breakdown
    curves: list[Part] = [figure] if figure is not None else []
    table = opened("Peaks by kind", memory_table(breakdown), len(breakdown.positions))
    curve_peak = max(p.memory.peak_bytes if p.memory is not None else 0 for p in report.step.positions)
    if curves and max(p.memory.peak_bytes for p in breakdown.positions) > (1 + NOTABLE) * curve_peak:
        curves.append("The planner's peaks, below, are bounds of the curves': more microbatches count as in flight.")
    return [*curves, table, *memory_notes(breakdown)]


def bound_parts(explanation: Explanation) -> Sequence[Part]:
    """Bound in words, the step by activity, and suggestions."""
    breakdown = explanation.breakdown
    parts: list[Part] = [f"Bound by {explanation.headline}.", *explanation.notes, breakdown_figure(breakdown)]
    if explanation.suggestions:
        parts.append(help_table(explanation, breakdown.step_seconds))
    table = opened("Step by activity", time_table(breakdown, WIDTH), len(breakdown.positions))
    return [*parts, f"Step by activity, {units_note(breakdown)}:", table]


def alternative_parts(plan: Plan, answers: Sequence[WhyNotResult]) -> Sequence[Part]:
    """Scatter and table of the plans that were considered."""
    figure = alternatives_figure(plan, answers)
    parts: list[Part] = [figure] if figure is not None else []
    if not plan.alternatives:
        return [*parts, "The plan file has no alternatives."]
    if all(a.peak_bytes is None for a in plan.alternatives):
        parts.append("The plan file does not have the memory of its alternatives. `autopar plan … -o` writes it.")
    return [*parts, alternative_table(plan, numbered=True)]


def opened(summary: str, table: RenderableType, rows: int) -> Part:
    """A table, closed at first if it is long."""
    return Details(f"{summary}: all {rows} rows", table) if rows > LONG_TABLE else table
