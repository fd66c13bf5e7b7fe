"""The ``autopar`` command and its sub-commands.

Neither this module nor the commands' modules import torch before a command runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import autopar
from autopar.tools.cli.bench import bench
from autopar.tools.cli.check import check
from autopar.tools.cli.codegen import codegen
from autopar.tools.cli.command import INTERRUPTED, Command, Commands
from autopar.tools.cli.explain import explain
from autopar.tools.cli.export import export
from autopar.tools.cli.plan import plan
from autopar.tools.cli.profile import profile
from autopar.tools.cli.simulate import simulate
from autopar.tools.cli.train import train
from autopar.tools.cli.verify import verify

app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,  # tables of rich cut the names of flags in a terminal of 80 columns
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, explain, simulate, check, train, verify, export, codegen, bench, profile):
    app.command(cls=Command)(command)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def callback(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Find the fastest way to split an unmodified vision model over devices, and train it there.

    MODEL is a timm name (vit_large_patch16_224), torchvision:NAME, or package.module:factory.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nothing fits, 4 the model cannot be traced.
    """


def main() -> None:
    """Run the command line and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the plan's characters shows question marks
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
