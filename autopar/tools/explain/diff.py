"""Differences between two plans of one model and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.microbatches import microbatches_text
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import recomputing_text
from autopar.ir.table import precision_text
from autopar.ir.units import BYTES, text
from autopar.tools.explain.breakdown import Breakdown, breakdown_of

NONE = "–"


@dataclass(frozen=True)
class Change:
    """One entry in which two plans differ, and its value in each."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Difference:
    """All differences between two plans, and the breakdown of each plan's step.

    ``cuts`` are first operations of stages and operations outside of their stage's range. ``shardings`` are layouts of
    weights and strategies of operations, as the files write them. ``notes`` explain why the steps may not compare.
    """

    settings: tuple[Change, ...]
    cuts: tuple[Change, ...]
    shardings: tuple[Change, ...]
    before: Breakdown
    after: Breakdown
    notes: tuple[str, ...]


def difference(before: Plan, after: Plan) -> Difference:
    """Difference of two plans.

    Raises:
        PlanError: the plans have different models, inputs or batches; names the field.
    """
    check_alike(before, after)
    notes = []
    if before.hardware != after.hardware:
        notes.append(
            f"The plans are priced for different machines, {machine(before)} and {machine(after)}: "
            "part of the difference between their steps comes from the machines."
        )
    return Difference(
        tuple(c for c in settings(before, after) if c.before != c.after),
        tuple(cuts(before, after)),
        (*changes(before.shardings, after.shardings), *changes(before.strategies, after.strategies)),
        breakdown_of(before),
        breakdown_of(after),
        tuple(notes),
    )


def check_alike(before: Plan, after: Plan) -> None:
    """Reject plans of different models or batches.

    Fingerprints include precision and memory format, so they are compared only if these agree.
    """
    model, other = before.model, after.model
    fields = {
        "model.name": (model.name, other.name),
        "model.kwargs": (dict(model.kwargs), dict(other.kwargs)),
        "model.num_params": (model.num_params, other.num_params),
        "batch": (before.batch, after.batch),
        "model.inputs": ([i.shape for i in model.inputs], [i.shape for i in other.inputs]),
    }
    if precision_text(before) == precision_text(after):
        fields["model.fingerprint"] = (model.fingerprint, other.fingerprint)
    for name, (first, second) in fields.items():
        if first != second:
            what = "batches" if name == "batch" else "models"
            raise PlanError(
                f"The plans are of different {what}: field {name} is {first} in the first and {second} in the second. "
                "Compare plans of one model and batch."
            )


def machine(plan: Plan) -> str:
    """Name and memory of a plan's machine."""
    return f"{plan.hardware.name} with {text(plan.hardware.memory_bytes, BYTES)}"


def sharing(plan: Plan) -> str:
    """ZeRO stage, and what else replicas share: ``3 over 8, 12 of 42 blocks kept``."""
    if not plan.zero:
        return "no"
    kept = sum(own == "kept" for own in plan.param_blocks.values())
    blocks = f", {kept} of {len(plan.param_blocks)} blocks kept" if plan.zero == 3 else ""
    return f"{plan.replicas.stage_text}{blocks}"


def settings(before: Plan, after: Plan) -> Iterator[Change]:
    """Settings of a whole plan, also those that are equal in both."""
    for name, value, other in (
        ("devices", before.mesh.devices, after.mesh.devices),
        ("hardware", machine(before), machine(after)),
        ("mesh", before.mesh, after.mesh),
        ("ZeRO", sharing(before), sharing(after)),
        ("gradients reduced in", before.reduce_dtype, after.reduce_dtype),
        ("schedule", before.schedule, after.schedule),
        ("chunks a rank", before.chunks, after.chunks),
        ("microbatches", cut_of(before), cut_of(after)),
        ("precision", precision_text(before), precision_text(after)),
        ("recomputing", recomputing(before), recomputing(after)),
    ):
        yield Change(name, str(value), str(other))


def cut_of(plan: Plan) -> str:
    """Microbatches of a replica, as text."""
    return microbatches_text(plan.batch // plan.mesh.dp, plan.microbatches)


def recomputing(plan: Plan) -> str:
    """Stages that recompute, as text."""
    if all(stage.recompute == "all" for stage in plan.stages):
        return "every stage"
    return recomputing_text(plan.stages) or "no stage"


def cuts(before: Plan, after: Plan) -> Iterator[Change]:
    """First operations of stages that differ, then operations that lie outside of their stage's range."""
    for s in range(1, max(len(before.stages), len(after.stages))):
        first, other_first = (p.stages[s].first if s < len(p.stages) else NONE for p in (before, after))
        if first != other_first:
            yield Change(f"stage {s} begins with", first, other_first)
    for name in sorted({*before.exceptions, *after.exceptions}):
        place, other_place = (
            f"stage {p.exceptions[name]}" if name in p.exceptions else "in its range" for p in (before, after)
        )
        if place != other_place:
            yield Change(name, place, other_place)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    """Entries that only one table has, or whose texts differ."""
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name, NONE), after.get(name, NONE))
