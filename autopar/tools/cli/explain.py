"""``autopar explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json
from autopar.tools.cli.why_not_args import WhyNotFlags


@takes_flags
@prints_json
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan file, as written by `autopar plan -o`.", metavar="PLAN.json")],
    why_not_flags: WhyNotFlags,
    diff: Annotated[
        Path | None,
        typer.Option(help="Another plan of the same model and batch to compare with.", metavar="OTHER.json"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Explain what bounds a plan's step, why other plans were not chosen, and how two plans differ."""
    from dataclasses import asdict

    from autopar.ir.plan import Plan
    from autopar.ir.status import showing_status
    from autopar.tools.cli.output import screen, show
    from autopar.tools.explain.advice import explained
    from autopar.tools.explain.diff import difference
    from autopar.tools.report.explain_table import answer_parts, difference_parts, explanation_parts

    why_not_flags.check()
    loaded = Plan.load(plan)
    explanation = explained(loaded)
    other = Plan.load(diff) if diff is not None else None
    changed = difference(loaded, other) if other is not None else None
    with showing_status("importing torch"):
        found = why_not_flags.answers(loaded)
    if as_json:
        show_json({"plan": plan, **asdict(explanation), "why_not": found, "diff": changed})
        return
    width = screen()[0]
    parts = [*explanation_parts(loaded, explanation, width)]
    if other is not None and changed is not None:
        parts += ["", *difference_parts(loaded, other, changed, width)]
    for answer in found:
        parts += ["", *answer_parts(loaded, explanation.breakdown, answer)]
    show(parts)
