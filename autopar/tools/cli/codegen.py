"""``autopar codegen``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json


class Mode(StrEnum):
    """Graph to print."""

    train = "train"
    eval = "eval"


@takes_flags
@prints_json
def codegen(
    plan: Annotated[Path, typer.Argument(help="A plan file, as written by `autopar plan -o`.", metavar="PLAN.json")],
    rank: Annotated[int, typer.Option(help="Rank whose program is printed.", metavar="R")],
    mode: Annotated[Mode, typer.Option(help="Program for training or for evaluation.")] = Mode.train,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Build this model instead of the one named in the plan.", metavar="MODEL"),
    ] = None,
    model_kwargs: Annotated[
        list[str] | None,
        typer.Option(help="Arguments of the model, instead of those in the plan.", metavar="NAME=VALUE ..."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the Python program that one rank of a plan runs."""
    from autopar.ir.plan import Plan
    from autopar.ir.status import showing_status
    from autopar.tools.cli.flags import parse_kwargs

    kwargs = parse_kwargs(model_kwargs) if model_kwargs is not None else None
    loaded = Plan.load(plan)
    with showing_status("importing torch"):
        from autopar.tools.cli.replan import stage_source

        source = stage_source(loaded, rank, mode.value, model, kwargs)
    if as_json:
        show_json({"rank": rank, "mode": mode, "source": source})
    else:
        typer.echo(source)
