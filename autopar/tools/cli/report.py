"""``autopar report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import UsageError
from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json
from autopar.tools.cli.why_not_args import WhyNotFlags


@takes_flags
@prints_json
def report(
    plan: Annotated[Path, typer.Argument(help="A plan file, as written by `autopar plan -o`.", metavar="PLAN.json")],
    why_not_flags: WhyNotFlags,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="HTML file to write; PLAN.html by default.", metavar="FILE"),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="Show measured times and memory too, from a file that `autopar bench -o` wrote for this plan.",
            metavar="BENCH.json",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan as a page with figures: the model, the step over time, memory, alternatives; opens offline."""
    from autopar.ir.plan import Plan
    from autopar.tools.bench.result import BenchResult
    from autopar.tools.cli.output import check_files, remark
    from autopar.tools.report.html.measured import measured_row
    from autopar.tools.report.html.page import page_of, save_page
    from autopar.tools.report.html.plots import needed_plotly
    from autopar.tools.report.html.sections import Measured, ReportInput

    why_not_flags.check()
    needed_plotly()
    loaded = Plan.load(plan)
    path = output or plan.with_suffix(".html")
    for source in (plan, bench):
        if source is not None and path.resolve() == source.resolve():
            raise UsageError(f"-o {path} would write over {source}. Give another file.")
    measured = None
    if bench is not None:
        result = BenchResult.load(bench)
        measured = Measured(result, measured_row(loaded, result, str(bench)))
    check_files({"-o": path})
    shown = ReportInput.of(loaded, measured, why_not_flags.answers(loaded))
    save_page(page_of(shown), path)
    if as_json:
        step_seconds = measured.row.median_seconds if measured is not None else None
        show_json({"file": path, "measured_step_seconds": step_seconds, "why_not": shown.answers})
    else:
        remark(f"saved to {path}")
