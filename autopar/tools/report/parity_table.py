"""Printed result of ``autopar check``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table

from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import replica_text
from autopar.ir.table import batch_text, schedule_text, stage_ends
from autopar.ir.text import labelled, numeric, plain_table
from autopar.ir.units import COUNT, plural, text
from autopar.tools.parity.compare import EPSILON, LEARNING_RATE, Parity
from autopar.tools.parity.difference import ABSOLUTE, RELATIVE, SMALL_NORM, TIMES, Row, rounding_of, update_rounding
from autopar.trace.passes.precision import low_param_dtype


def parity_parts(parity: Parity, plan: Plan) -> Sequence[RenderableType]:
    """Setting of the comparison, a row per quantity, and the verdict.

    Args:
        plan: the comparison's plan with the model's full name.
    """
    stages = " | ".join(first if first == last else f"{first} … {last}" for first, last in stage_ends(plan.stages))
    devices = plural(plan.mesh.devices, "device")
    trained = f"{plural(parity.steps, 'AdamW step')} (lr {LEARNING_RATE:g}, eps {EPSILON:g}), " if parity.steps else ""
    absolute = ABSOLUTE * parity.scale
    lines = [
        ("model", f"{plan.model.name}, {text(plan.model.num_params, COUNT)} parameters"),
        ("compared", f"a: on {devices}; b: {reference_text(parity)} on one device, with the same microbatches"),
        ("mesh", mesh_text(plan)),
        ("batch", f"{batch_text(plan)}, schedule {schedule_text(plan)}"),
        ("stages", stages),
        ("training", f"{trained}{parity.loss}" if parity.steps else "not compared"),
        (
            "tolerance",
            f"|a−b| ≤ {absolute:.0e} + {RELATIVE * parity.scale:.0e}·|b| for every element; instead of "
            f"{absolute:.0e}: {absolute / SMALL_NORM:.0e}·‖b‖ in a tensor with ‖b‖ < {SMALL_NORM:g}, "
            f"{absolute:.0e}·rms(b) in one with rms(b) > 1",
        ),
        *(("", text) for text in noise_texts(parity)),
        *(("note", note) for note in parity.notes),
    ]
    return [labelled(lines), "", row_table(parity.rows), "", verdict(parity)]


def parity_numbers(parity: Parity, plan: Plan) -> dict[str, Any]:
    """The comparison for programs; keys as in docs/command_line.md."""
    return {
        "ok": parity.ok,
        "model": plan.model.name,
        "devices": plan.mesh.devices,
        "mesh": {"pp": plan.mesh.pp, "tp": plan.mesh.tp, "dp": plan.mesh.dp},
        "batch": plan.batch,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "precision": plan.precision,
        "steps": parity.steps,
        "loss": parity.loss,
        "quantities": parity.rows,
        "notes": parity.notes,
    }


def reference_text(parity: Parity) -> str:
    """The reference in words."""
    if low_param_dtype(parity.plan.precision):
        return f"the unmodified model with copies of its parameters in {parity.autocast}"
    return "the unmodified model" + (f" under torch.autocast in {parity.autocast}" if parity.autocast else "")


def noise_texts(parity: Parity) -> Sequence[str]:
    """Additional tolerance of a low precision, in words; none in the model's own precision."""
    if parity.low is None:
        return ()
    relative = rounding_of(parity.low).relative
    updates = update_rounding(parity.low, LEARNING_RATE * parity.steps)
    return (
        f"or ‖a−b‖ ≤ {TIMES:g}·‖b−c‖ + {relative:.0e}·‖b‖ for every tensor, where c is b in float32; for weights "
        f"{updates.absolute:.0e}·√n + {updates.single:.0e} instead of {relative:.0e}·‖b‖",
    )


def mesh_text(plan: Plan) -> str:
    """The mesh, and how much its tensor axis splits: a comparison in which it splits nothing proves little."""
    weights = [text for text in plan.shardings.values() if Layout.parse(text).splits]
    labels = [label for label in plan.strategies.values() if label]
    split = f", {plural(len(labels), 'operation')} and {plural(len(weights), 'weight')} split (repeated ones once)"
    return f"{plan.mesh}{replica_text(plan)}{split if plan.mesh.tp > 1 else ''}"


def row_table(rows: Sequence[Row]) -> Table:
    """A row per quantity."""
    numbers = numeric("tensors", "max |a−b|", "max ‖a−b‖/‖b‖", no_wrap=True)
    table = plain_table("quantity", *numbers, Column("result", no_wrap=True), "worst tensor")
    for row in rows:
        result = "ok, bitwise equal" if row.bitwise and row.ok else "ok" if row.ok else "FAILED"
        table.add_row(
            row.quantity,
            f"{row.num_tensors:,}",
            number(row.max_absolute),
            number(row.max_relative),
            result,
            "" if row.bitwise else row.worst,
            style="" if row.ok else "red",
        )
    return table


def number(value: float) -> str:
    """A difference with two digits; exactly zero is ``0``."""
    return "0" if value == 0 else f"{value:.1e}"


def verdict(parity: Parity) -> str:
    """One sentence: equal within the tolerance, bitwise equal, or the quantities that differ."""
    failed = [row.quantity for row in parity.rows if not row.ok]
    if failed:
        return f"FAILED: {', '.join(failed)} differ by more than the tolerance."
    what = "Everything" if parity.steps else "Evaluation, the only thing compared,"
    how = "bit by bit" if all(row.bitwise for row in parity.rows) else "within the tolerance"
    return f"{what} is equal {how}."
