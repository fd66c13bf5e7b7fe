"""Printed result of ``autopar simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from autopar.ir.plan_parts import replica_text
from autopar.ir.table import GAP, NEARLY_FULL, NOTABLE_SHARE, batch_text, precision_text, ranks_text, step_parts
from autopar.ir.text import NONE, labelled, numeric, plain_table
from autopar.ir.units import BYTES, COUNT, TIME, column, percent, plural, text
from autopar.tools.simulate.step import Position, SimulatedStep

MAX_ROWS = 16  # rows of the timeline


def simulation_parts(step: SimulatedStep, own: SimulatedStep, width: int) -> Sequence[RenderableType]:
    """Setting of the simulation, a row per pipeline position, and the timeline if it fits.

    Args:
        own: the step under the plan's schedule.
        width: columns of the screen.
    """
    parts: list[RenderableType] = [labelled([*header(step), *notes(step, own)]), "", position_table(step, width)]
    if step.schedule != own.schedule:
        parts += ["", comparison_table(step, own)]
    names = [position.name for position in step.positions]
    if len(names) <= MAX_ROWS and step.timeline.fits(width, names):
        rows = "\n".join(step.timeline.rows(width, names))
        parts += ["", Text("the pipeline; numbers are microbatches, dots wait"), Text(rows, no_wrap=True)]
    return parts


def header(step: SimulatedStep) -> list[tuple[str, str]]:
    """Labelled lines: the plan and the duration of its step."""
    plan, mesh, reduce_seconds = step.plan, step.plan.mesh, step.plan.prediction.reduce_seconds
    band = f"±{percent(plan.prediction.error, 0)}"
    chunks = f", {plan.chunks} chunks a rank" if plan.chunks > 1 else ""
    return [
        ("model", f"{plan.model.name}, {text(plan.model.num_params, COUNT)} parameters, {precision_text(plan)}"),
        ("batch", batch_text(plan)),
        (
            "devices",
            f"{mesh.devices:,} × {plan.hardware.device}, {text(plan.hardware.memory_bytes, BYTES)} each, over "
            f"{plan.hardware.link} (cost model {plan.hardware.name})",
        ),
        ("mesh", f"{mesh}{replica_text(plan)}"),
        ("schedule", f"{step.schedule}{chunks}"),
        (
            "step",
            f"{text(step.step_seconds, TIME)} {band}, {step.samples_per_second:,.1f} samples/s {band} (simulated)",
        ),
        *step_parts(step.step_seconds, reduce_seconds, step.end_seconds - reduce_seconds),
        ("bubble", f"{percent(step.bubble_fraction)} of the pipeline's {text(step.pipeline_seconds, TIME)}"),
    ]


def notes(step: SimulatedStep, own: SimulatedStep) -> list[tuple[str, str]]:
    """Labelled lines: contradictions in the plan, missing memory figures, positions whose memory does not fit."""
    found = []
    said, seconds = step.plan.prediction.step_seconds, own.step_seconds
    if abs(seconds - said) > NOTABLE_SHARE * said:
        found.append(
            (
                "note",
                f"the plan predicts {text(said, TIME)} under {own.schedule}; the times of its stages make "
                f"{text(seconds, TIME)}: it was edited or made by hand",
            )
        )
    if any(position.memory is None for position in step.positions):
        found.append(
            (
                "memory",
                "not simulated: the plan does not say what its stages hold (field stages.*.memory); it was made by "
                "hand. `autopar plan … -o` says it",
            )
        )
    capacity = step.plan.hardware.memory_bytes
    over = [position for position in step.positions if peak_bytes(position) > capacity]
    if over:
        fullest = max(over, key=peak_bytes)
        needs = "needs" if len(fullest.ranks) == 1 else "need"
        others = f"; {len(over)} of {plural(len(step.positions), 'position')} are too full" if len(over) > 1 else ""
        found.append(
            (
                "memory",
                f"does not fit: {fullest.name} {needs} {text(peak_bytes(fullest), BYTES)} of "
                f"{text(capacity, BYTES)}{others}",
            )
        )
    return found


def position_table(step: SimulatedStep, width: int) -> Table:
    """A row per position: its step by activity, and its peak memory.

    Collectives are tensor-parallel collectives and the exposed gradient reduction.
    """
    positions, capacity = step.positions, step.plan.hardware.memory_bytes
    collectives = [p.collective_seconds + p.reduce_seconds for p in positions]
    peaks, shares = [peak_bytes(p) for p in positions], [percent(peak_bytes(p) / capacity, 0) for p in positions]
    whole = step.step_seconds
    cells = {
        "ranks": [ranks_text(p.ranks) for p in positions],
        "stages" if step.plan.chunks > 1 else "stage": [stages_text(p) for p in positions],
        "busy": [percent(p.busy_seconds / whole if whole else 0.0, 0) for p in positions],
        "compute": column([p.compute_seconds for p in positions], TIME),
        **({"collectives": column(collectives, TIME)} if any(collectives) else {}),
        "waiting": column([step.waiting_seconds(p) for p in positions], TIME),
        "optimizer": column([p.optimizer_seconds for p in positions], TIME),
    }
    if all(p.memory is not None for p in positions):
        wide = max(map(len, shares))
        cells["peak memory"] = [f"{peak} {share:>{wide}}" for peak, share in zip(column(peaks, BYTES), shares)]
    if sum(GAP + max(map(len, (title, *texts))) for title, texts in cells.items()) > width:
        cells.pop("stages", None)
    table = plain_table(*numeric(*cells, no_wrap=True))
    for i, position in enumerate(positions):
        share = peak_bytes(position) / capacity
        style = "red" if share > 1 else "yellow" if share > NEARLY_FULL else ""
        table.add_row(*(texts[i] for texts in cells.values()), style=style)
    return table


def comparison_table(step: SimulatedStep, own: SimulatedStep) -> Table:
    """A row for the simulated schedule and one for the plan's."""
    table = plain_table(Column("schedule", no_wrap=True), *numeric("step", "bubble", "peak memory", "compared"))
    for one in (step, own):
        peak = max(peak_bytes(position) for position in one.positions)
        ratio = one.step_seconds / own.step_seconds if own.step_seconds else 1.0
        faster = "slower" if ratio >= 1 else "faster"
        table.add_row(
            f"{one.schedule}{' (the plan)' if one is own else ''}",
            text(one.step_seconds, TIME),
            percent(one.bubble_fraction),
            text(peak, BYTES) if peak else NONE,
            NONE if one is own else f"{percent(abs(ratio - 1))} {faster}",
        )
    return table


def peak_bytes(position: Position) -> int:
    """Peak memory of a rank at a position; 0 if the plan has no memory figures of its stages."""
    return position.memory.peak_bytes if position.memory is not None else 0


def stages_text(position: Position) -> str:
    """Stages of a position as text: ``3``, ``0, 4``, ``0, 4 … 20``."""
    numbers = [str(stage) for stage in position.stages]
    return ", ".join(numbers) if len(numbers) <= 3 else f"{numbers[0]}, {numbers[1]} … {numbers[-1]}"


def numbers(step: SimulatedStep, own: SimulatedStep) -> dict[str, Any]:
    """All numbers of the step but spans and curves, as JSON types."""
    plan = step.plan
    return {
        "model": plan.model.name,
        "batch": plan.batch,
        "mesh": {"pp": plan.mesh.pp, "tp": plan.mesh.tp, "dp": plan.mesh.dp},
        "chunks": plan.chunks,
        "microbatches": plan.microbatches,
        "schedule": step.schedule,
        "step_seconds": step.step_seconds,
        "pipeline_seconds": step.pipeline_seconds,
        "end_seconds": step.end_seconds,
        "samples_per_second": step.samples_per_second,
        "bubble_fraction": step.bubble_fraction,
        "capacity_bytes": plan.hardware.memory_bytes,
        "positions": [
            {
                "first_rank": position.ranks[0],
                "last_rank": position.ranks[-1],
                "stages": position.stages,
                "compute_seconds": position.compute_seconds,
                "collective_seconds": position.collective_seconds,
                "reduce_seconds": position.reduce_seconds,
                "optimizer_seconds": position.optimizer_seconds,
                "waiting_seconds": step.waiting_seconds(position),
                "peak_bytes": position.memory.peak_bytes if position.memory is not None else None,
            }
            for position in step.positions
        ],
        "plan_schedule": own.schedule,
        "plan_step_seconds": own.step_seconds,
    }
