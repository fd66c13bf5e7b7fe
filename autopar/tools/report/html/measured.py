"""The row of a bench that ran a plan."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.tools.bench.result import BenchResult
from autopar.tools.bench.row import BenchRow


def measured_row(plan: Plan, result: BenchResult, where: str) -> BenchRow:
    """The row of the plan, autopar's before others that ran an equal plan.

    Args:
        where: the bench file, for errors.
    Raises:
        UsageError: no row is of this plan, or it has no measurements.
    """
    ran = [row for row in result.rows if row.pipeline is not None]
    if not ran:
        why = next((f": {row.reason}" for row in result.rows if row.contestant == "autopar" and row.reason), "")
        raise UsageError(f"No row of {where} ran a plan{why}. Run `autopar bench` with autopar among its baselines.")
    differs = [
        f"{name} {theirs} there, {ours} here"
        for name, theirs, ours in (
            ("model", result.model, plan.model.name),
            ("batch", result.batch, plan.batch),
            ("precision", result.precision, plan.precision),
        )
        if theirs != ours
    ]
    rows = [row for row in ran if row.pipeline is not None and row.pipeline.plan == plan.decision]
    if not differs and not rows:
        from autopar.tools.bench.description import plan_label  # imports torch

        theirs, ours = result.plan, plan_label(plan)
        differs = [f"{theirs} there, {ours} here" if theirs != ours else f"{ours}, with other cuts or shardings"]
    if differs:
        raise UsageError(
            f"{where} is of another plan than this file: {'; '.join(differs)}. Save the plan that was measured: "
            f"`autopar plan … -o` with the flags of `{result.command}`."
        )
    return min(rows, key=lambda row: row.contestant != "autopar")
