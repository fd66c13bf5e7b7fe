"""``autopar explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.command import takes_flags


@takes_flags
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan file, as written by `autopar plan -o`.", metavar="PLAN.json")],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            help="Plan again under constraints, such as tp=4 or pp=2,schedule=1f1b, and compare the steps; "
            "may be repeated.",
            metavar="NAME=VALUE[,...]",
        ),
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option(help="Another plan of the same model and batch to compare with.", metavar="OTHER.json"),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="For --why-not: the plan's cost model, if autopar does not ship it.", metavar="FILE"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="For --why-not: build this model instead of the one named in the plan.", metavar="MODEL"
        ),
    ] = None,
    model_kwargs: Annotated[
        list[str] | None,
        typer.Option(
            help="For --why-not: arguments of the model, instead of those in the plan.", metavar="NAME=VALUE ..."
        ),
    ] = None,
    opt: Annotated[
        str | None,
        typer.Option(
            help="For --why-not: optimizer that the plan is for, by timm's name; AdamW by default.", metavar="NAME"
        ),
    ] = None,
    model_ema: Annotated[
        bool,
        typer.Option(
            "--model-ema", help="For --why-not: the plan is for training with a moving average of the weights (EMA)."
        ),
    ] = False,
    channels_last: Annotated[
        bool,
        typer.Option(
            "--channels-last", help="For --why-not: the plan is for model and images in channels_last memory format."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
) -> None:
    """Explain what bounds a plan's step, why other plans were not chosen, and how two plans differ."""
    import json
    from dataclasses import asdict

    from autopar.errors import UsageError
    from autopar.ir.plan import Plan
    from autopar.tools.cli.flags import parse_kwargs
    from autopar.tools.cli.output import screen, show
    from autopar.tools.cli.replan import rebuilt_of
    from autopar.tools.cli.why_not_args import parse_constraints
    from autopar.tools.explain.advice import explained
    from autopar.tools.explain.diff import difference
    from autopar.tools.explain.why_not import Query, answers
    from autopar.tools.report.explain_table import answer_parts, difference_parts, explanation_parts

    questions = [Query(text, parse_constraints(text)) for text in why_not or []]
    only_for_questions = {
        "--hardware": hardware,
        "--model": model,
        "--model-kwargs": model_kwargs,
        "--opt": opt,
        "--model-ema": model_ema or None,
        "--channels-last": channels_last or None,
    }
    for flag, value in only_for_questions.items():
        if value is not None and not questions:
            raise UsageError(f"{flag} is for --why-not, which is not given. Leave it out.")
    loaded = Plan.load(plan)
    explanation = explained(loaded)
    other = Plan.load(diff) if diff is not None else None
    changed = difference(loaded, other) if other is not None else None
    found = ()
    if questions:
        kwargs = parse_kwargs(model_kwargs) if model_kwargs is not None else None
        rebuilt = rebuilt_of(loaded, model, kwargs, hardware, opt, model_ema, channels_last)
        found = answers(loaded, rebuilt, questions)
    if as_json:
        report = {"plan": str(plan), **asdict(explanation), "why_not": [asdict(a) for a in found]}
        typer.echo(json.dumps(report | {"diff": asdict(changed) if changed is not None else None}, indent=2))
        return
    width = screen()[0]
    parts = [*explanation_parts(loaded, explanation, width)]
    if other is not None and changed is not None:
        parts += ["", *difference_parts(loaded, other, changed, width)]
    for answer in found:
        parts += ["", *answer_parts(loaded, explanation.breakdown, answer)]
    show(parts)
