"""``autopar simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import UsageError
from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.completion import offered
from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json


@takes_flags
@prints_json
def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan file, as written by `autopar plan -o`.", metavar="PLAN.json")],
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Schedule to simulate instead of the plan's: 1f1b or gpipe if ranks have one chunk, interleaved or "
            "interleaved-overlap if they have several.",
            metavar="NAME",
            autocompletion=offered(lambda: ("1f1b", "gpipe", "interleaved", "interleaved-overlap")),
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a timeline for ui.perfetto.dev.", metavar="FILE")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a chart of the step and of memory over time as PNG.", metavar="FILE")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a planned training step: when ranks compute, wait and hold memory; needs no model and no devices."""
    from autopar.ir.plan import Plan
    from autopar.tools.cli.output import check_files, remark, screen, show, write
    from autopar.tools.report.figure import needed_figure, save_figure
    from autopar.tools.report.plan_trace import trace_events
    from autopar.tools.report.simulate_table import numbers, simulation_parts
    from autopar.tools.report.simulation_picture import figure_of
    from autopar.tools.simulate.step import simulate_plan

    found = Plan.load(plan)
    if png is not None:
        needed_figure()
    for flag, path in {"--trace": trace, "--png": png}.items():
        if path is not None and path.resolve() == plan.resolve():
            raise UsageError(f"{flag} {path} would write over the plan. Give another file.")
    check_files({"--trace": trace, "--png": png})
    own = simulate_plan(found)
    step = own if schedule is None else simulate_plan(found, schedule)
    if as_json:
        show_json(numbers(step, own))
    else:
        show(simulation_parts(step, own, screen()[0]))
    if trace is not None:
        write(trace, json.dumps(trace_events(step), separators=(",", ":")))
    if png is not None:
        save_figure(figure_of(step), png)
    written = [str(path) for path in (trace, png) if path is not None]
    if written:
        remark(f"\nsaved to {' and '.join(written)}")
