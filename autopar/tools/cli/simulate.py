"""``autopar simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import UsageError
from autopar.tools.cli.command import takes_flags


@takes_flags
def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan file, as written by `autopar plan -o`.", metavar="PLAN.json")],
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Schedule to simulate instead of the plan's: 1f1b or gpipe if ranks have one chunk, interleaved or "
            "interleaved-overlap if they have several.",
            metavar="NAME",
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a timeline for ui.perfetto.dev.", metavar="FILE")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a chart of the step and of memory over time as PNG.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and nothing else.")] = False,
) -> None:
    """Simulate a planned training step: when ranks compute, wait and hold memory; needs no model and no devices."""
    from autopar.ir.plan import Plan
    from autopar.tools.cli.output import check_files, screen, show, write
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
        typer.echo(json.dumps(numbers(step, own), indent=2))
    else:
        show(simulation_parts(step, own, screen()[0]))
    if trace is not None:
        write(trace, json.dumps(trace_events(step), separators=(",", ":")))
    if png is not None:
        save_figure(figure_of(step), png)
    written = [str(path) for path in (trace, png) if path is not None]
    if written and not as_json:
        typer.echo(f"\nsaved to {' and '.join(written)}")
