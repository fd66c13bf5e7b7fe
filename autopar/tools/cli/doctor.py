"""``autopar doctor``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.completion import hardware_names, offered
from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json

QUIET_SECONDS = 3.0  # without progress


@takes_flags
@prints_json
def doctor(
    run_folder: Annotated[
        Path, typer.Option(help="Folder whose disk is measured: where runs are written.", metavar="DIR")
    ] = Path(),
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices between which transfers are measured, each pair; by default all GPUs, or 2 CPU processes.",
            metavar="N",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Cost model whose rates are compared with this machine's; by default the one that plans use here.",
            metavar="NAME|FILE",
            autocompletion=offered(hardware_names),
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine: versions, GPUs, links, limits, launcher, compiler, solver, disk; a remedy for each fault.

    Lines are ok, slow (works, but costs time or may fail later) or broken; – is what the machine does not have. The
    exit code is 1 if something is broken, else 0. Of the processes of torchrun or srun, the first of each node checks
    its node.

    With --json: {"autopar": version, "exit_code": 0 or 1, "summary": {"ok", "slow", "broken", "absent": number of
    findings}, "findings": [{"section", "name", "status", "value", "remedy": text, empty where none is needed, "rate":
    null, or {"measured", "predicted": by the cost model, or null, "unit": "B/s" or "FLOP/s"}}]}
    """
    from autopar.tools.cli.output import show
    from autopar.tools.doctor.page import Request, checked_machine
    from autopar.tools.report.doctor_table import doctor_data, doctor_parts

    if not is_first_of_node():
        return
    with showing_progress() as progress:
        page = checked_machine(Request(run_folder, devices, hardware), progress)
    if as_json:
        show_json(doctor_data(page))
    else:
        show(doctor_parts(page))
    raise typer.Exit(page.exit_code)


def is_first_of_node() -> bool:
    """Whether this process is the first of its node's, by its launcher's variables; True without a launcher."""
    from autopar.errors import UsageError
    from autopar.tools.doctor.host import LAUNCHERS

    if not LAUNCHERS & os.environ.keys():
        return True
    try:
        from autopar.runtime.launch.environment import launched

        launch = launched()
    except (ImportError, OSError, UsageError, ValueError):  # findings of the page say so
        return True
    return launch is None or launch.local_rank == 0


@contextmanager
def showing_progress() -> Iterator[Callable[[str], None]]:
    """Within ``with``, a function that shows the probe that runs, once `QUIET_SECONDS` have passed."""
    from autopar.ir.terminal import progress_console

    console, start = progress_console(), time.monotonic()
    sections: set[str] = set()

    def show(name: str) -> None:
        section = name.partition(":")[0]
        if time.monotonic() - start < QUIET_SECONDS:
            return
        if console.is_interactive:
            status.update(f"checking {name}")
            status.start()
        elif section not in sections:
            sections.add(section)
            console.print(f"checking {section} …")

    status = console.status("")
    try:
        yield show
    finally:
        status.stop()
