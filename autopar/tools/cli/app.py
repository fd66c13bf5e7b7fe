"""The ``autopar`` command and its sub-commands.

Neither this module nor the commands' modules import torch before a command runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import atexit
import gc
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import autopar
from autopar.errors import EXIT_CODES
from autopar.tools.cli.bench import bench
from autopar.tools.cli.check import check
from autopar.tools.cli.codegen import codegen
from autopar.tools.cli.command import INTERRUPTED, Command, Commands
from autopar.tools.cli.doctor import doctor
from autopar.tools.cli.explain import explain
from autopar.tools.cli.export import export
from autopar.tools.cli.plan import plan
from autopar.tools.cli.process_end import ProcessEnd
from autopar.tools.cli.profile import profile
from autopar.tools.cli.report import report
from autopar.tools.cli.simulate import simulate
from autopar.tools.cli.train import train
from autopar.tools.cli.verify import verify

BRIEF = ("plan", "explain", "simulate", "codegen")  # commands that only read, plan and print
EXIT_TABLE = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
HELP = f"""Find the fastest way to split an unmodified vision model over devices, and train it there.

MODEL is a timm name (vit_large_patch16_224), torchvision:NAME, or package.module:factory.

--debug and --quiet may stand anywhere. Colors follow NO_COLOR and FORCE_COLOR.

\b
Exit codes:
{EXIT_TABLE}
"""

app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,  # tables of rich cut the names of flags in a terminal of 80 columns
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, explain, simulate, report, check, train, verify, export, codegen, bench, profile, doctor):
    app.command(cls=Command)(command)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def callback(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show neither progress nor remarks: results, warnings and errors alone.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Flags of all commands."""
    if context.invoked_subcommand in BRIEF and isinstance(context.obj, ProcessEnd):  # not called from Python
        context.obj.is_brief = True
        gc.disable()  # imports and plans make millions of objects, and few cycles


def main() -> None:
    """Run the command line and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the plan's characters shows question marks
    end = ProcessEnd()
    atexit.register(end.skip_teardown)
    try:
        app(obj=end)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        end.exit_code = ended.code if isinstance(ended.code, int) else None
        raise
