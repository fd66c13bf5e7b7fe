"""``autopar profile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import UsageError, suggest
from autopar.tools.cli.command import ReportedInterrupt
from autopar.tools.cli.flags import JsonFlag
from autopar.tools.cli.json_output import prints_json, show_json

if TYPE_CHECKING:
    from rich.table import Table

    from autopar.measure.device import ProfileSetting
    from autopar.measure.machine.cases import Case
    from autopar.measure.machine.constants import Constant
    from autopar.measure.machine.launched import LaunchedRanks
    from autopar.measure.machine.points import MeasuredPoint
    from autopar.measure.machine.preserved import PreservedSections
    from autopar.measure.machine.write_cost_model import RawMeasurements
    from autopar.runtime.launch.devices import Machine

DEFAULT_FILE = Path("machine.toml")
CPU_DEVICES = 2
MAX_NAMED = 8  # measurements that an error names


@prints_json
def profile(
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="TOML file of the cost model. An existing file keeps its name, link_name, devices_per_node, and its "
            "tables [network], [reserve], [overlap] and [calibration], except values that were measured.",
            metavar="FILE",
        ),
    ] = DEFAULT_FILE,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the machine; by default the name of FILE.", metavar="NAME")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Devices to measure; by default all GPUs, or {CPU_DEVICES} processes on CPU. Under torchrun "
            "and srun all their processes.",
            metavar="N",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="gloo (CPU) or nccl (GPUs); by default nccl if there are GPUs.", metavar="NAME")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only these again and keep the rest of FILE: capacity, launch, matmul, attention, "
            "convolution, depthwise, memory, optimizer, point-to-point, all-reduce, all-gather, "
            "reduce-scatter, all-to-all, overlap; network is all that is between nodes.",
            metavar="KIND,…",
        ),
    ] = None,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Write the file even if repeated measurements disagree, as on a busy machine."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine for a few minutes and write a cost model for --hardware.

    Under torchrun and srun every process takes part: the first node is measured, and the network between nodes. An
    interrupted run resumes where it stopped: its measurements are in FILE.part.
    """
    kinds = parse_kinds(only)
    machine, per_node = profiled_machine(devices, backend)
    if machine.launched is None:
        run_profile(profile_request(output, name, machine, per_node, kinds), anyway, as_json)
        return
    from autopar.measure.machine.launched import launched_ranks

    with launched_ranks(machine, machine.launched) as ranks:
        if machine.launched.rank > 0:
            ranks.follow()
        else:
            run_profile(profile_request(output, name, machine, per_node, kinds, ranks), anyway, as_json)


def run_profile(request: ProfileRequest, anyway: bool, as_json: bool) -> None:
    """Measure, and write the file if all is there that it needs."""
    from autopar.tools.cli.output import remark, show

    raw, num_measured = measure_points(request)
    categories = dict.fromkeys(case.category for case in request.cases)
    missing = [category for category in categories if category not in {p.case.category for p in raw.points}]
    if missing:
        typer.echo(
            f"Measured {num_measured} points, kept in {request.part}. {request.output} needs {', '.join(missing)} too: "
            f"autopar profile -o {request.output}"
        )
        if as_json:
            show_json({"file": None, "part": request.part, "missing": missing, "constants": ()})
        return
    constants = write_cost_model(request, raw, anyway)
    if as_json:
        show_json({"file": request.output, "part": None, "missing": (), "constants": constants})
    else:
        show([constants_table(constants)])
    kept = request.preserved.without({constant.path for constant in constants}).tables
    if kept:
        sections = (f"[{table}] {' and '.join(numbers)}" for table, numbers in kept.items())
        remark(f"kept as they were: {', '.join(sections)}")
    devices = raw.setting.devices * raw.setting.nodes
    command = f"autopar plan MODEL --devices {devices} --hardware {request.output}"
    remark(f"\nsaved to {request.output}; plan with it: {command}")


@dataclass(frozen=True)
class ProfileRequest:
    """The measurements of one run of the command, and the file that it writes.

    Args:
        part: file of the points so far.
        cases: all cases of a cost model for this machine.
        preserved: sections of the file that is replaced.
        kinds: kinds of --only; empty for all.
        ranks: of the launcher; None where the command starts processes.
    """

    output: Path
    part: Path
    name: str | None
    setting: ProfileSetting
    cases: tuple[Case, ...]
    preserved: PreservedSections
    kinds: frozenset[str]
    ranks: LaunchedRanks | None = None


def profiled_machine(devices: int | None, backend: str | None) -> tuple[Machine, int]:
    """The machine to measure, and its devices on each node.

    Raises:
        UsageError: too few GPUs, an unknown or unavailable backend, or a count that differs from the launcher's.
    """
    if backend not in (None, "gloo", "nccl"):
        raise UsageError(f"--backend {backend!r} is unknown. It is gloo (CPU) or nccl (GPU).")
    from autopar.runtime.launch.devices import this_machine
    from autopar.runtime.launch.environment import launched

    launch = launched()
    if launch is not None:
        return this_machine(devices, backend), launch.devices_per_node
    devices = devices or default_devices(backend)
    return this_machine(devices, backend), devices


def default_devices(backend: str | None) -> int:
    """Devices that are measured without --devices."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() and backend != "gloo" else 0
    return gpus or CPU_DEVICES


def profile_request(
    output: Path, name: str | None, machine: Machine, devices: int, kinds: frozenset[str],
    ranks: LaunchedRanks | None = None,
) -> ProfileRequest:  # fmt: skip
    """The request that the flags describe.

    Args:
        devices: of each node.
    Raises:
        UsageError: a flag is wrong, or a file cannot be written.
        HardwareError: the file that is replaced cannot be read.
    """
    if output.suffix != ".toml":
        raise UsageError(f"-o {output} must end in .toml: --hardware knows a file by that.")
    if name is not None and not name.strip():
        raise UsageError("--name is empty. Give the machine a name, or leave it out.")
    from autopar.measure.device import profile_setting
    from autopar.measure.machine.cases import cases
    from autopar.measure.machine.preserved import preserved_sections
    from autopar.tools.cli.output import check_writable

    part = output.with_name(output.name + ".part")
    for path in (output, part):
        check_writable(path)
    setting, preserved = profile_setting(machine, devices), preserved_sections(output, machine.device_type)
    all_cases = cases(setting.device_type, devices, setting.nodes, preserved.levels)
    return ProfileRequest(output, part, name, setting, all_cases, preserved, kinds, ranks)


def measure_points(request: ProfileRequest) -> tuple[RawMeasurements, int]:
    """Measure the cases whose points cannot be reused.

    Returns:
        All points in the order of measuring, and how many were measured now.
    Raises:
        UsageError, HardwareError: as `reusable_points`.
        WorkerError: a worker process failed.
    """
    from autopar.measure.machine.measure import measure
    from autopar.measure.machine.points import load_points
    from autopar.measure.machine.write_cost_model import RawMeasurements
    from autopar.train import exits_on_sigterm

    setting, part = request.setting, request.part
    reused = reusable_points(request)
    reused_cases = {point.case for point in reused}
    todo = [c for c in request.cases if c not in reused_cases and (not request.kinds or c.category in request.kinds)]
    try:
        with exits_on_sigterm(), showing_progress(len(todo)) as progress:
            (request.ranks.measure if request.ranks else measure)(setting, todo, part, reused, progress)
    except KeyboardInterrupt as error:
        typer.echo(f"Interrupted; measurements so far are in {part}. The same command resumes from there.", err=True)
        raise ReportedInterrupt from error
    points = {point.case: point for point in load_points(part, setting).points}
    return RawMeasurements(setting, tuple(points[case] for case in request.cases if case in points)), len(todo)


def write_cost_model(request: ProfileRequest, raw: RawMeasurements, anyway: bool) -> Sequence[Constant]:
    """Fit the constants and write the file.

    Args:
        anyway: whether points whose repeats spread are accepted.
    Raises:
        UsageError: times do not grow with sizes, or repeats spread.
    """
    import datetime

    from autopar.cost.hardware.load import load_hardware
    from autopar.measure.machine.fit_constants import fit
    from autopar.measure.machine.write_cost_model import cost_model_text

    output = request.output
    constants = fit(raw.points, raw.setting)
    preserved = request.preserved.without({constant.path for constant in constants})
    if not anyway:
        check_spread(raw, request.part)
    name = request.name or preserved.name or output.stem
    output.write_text(cost_model_text(name, raw, constants, datetime.date.today(), preserved), encoding="utf-8")
    load_hardware(output)
    request.part.unlink()
    return constants


def parse_kinds(texts: Sequence[str] | None) -> frozenset[str]:
    """The kinds in ``--only matmul,launch``; empty if the flag was not given.

    Raises:
        UsageError: a kind is unknown, or the flag has none.
    """
    from autopar.measure.machine.cases import CATEGORIES

    if texts is None:
        return frozenset()
    names = [n.strip() for text in texts for n in text.split(",") if n.strip()]
    unknown = [n for n in names if n not in CATEGORIES]
    if unknown or not names:
        hint = suggest(unknown[0], CATEGORIES) if unknown else ""
        raise UsageError(f"--only {','.join(texts)!r} names no kind.{hint} There are {', '.join(CATEGORIES)}.")
    return frozenset(names)


def reusable_points(request: ProfileRequest) -> tuple[MeasuredPoint, ...]:
    """Points that are not measured again: of an interrupted run, or with --only the other kinds in FILE.

    Raises:
        UsageError: FILE.part is not a file of points.
        HardwareError: the cost model's points cannot be read.
    """
    from autopar.measure.machine.points import load_points
    from autopar.measure.machine.write_cost_model import raw_points
    from autopar.tools.cli.output import remark

    output, setting = request.output, request.setting
    resumed = load_points(request.part, setting)
    if resumed.note:
        remark(resumed.note, err=True)
    if resumed.points or not request.kinds or not output.exists():
        return resumed.points
    raw = raw_points(output)
    if raw is None or setting.differences(raw.setting):
        why = "no points" if raw is None else f"points of another setting ({setting.differences(raw.setting)})"
        remark(f"{output} has {why}; it is measured again.", err=True)
        return ()
    points = tuple(p for p in raw.points if p.case.category not in request.kinds)
    remark(f"Keeping {len(points)} points of {output}.", err=True)
    return points


def check_spread(raw: RawMeasurements, part: Path) -> None:
    """Discard points whose repeats spread too much, so that the next run measures them again.

    Raises:
        UsageError: there are such points; it names them and their spread.
    """
    from autopar.ir.units import first_few, plural
    from autopar.measure.machine.points import MAX_STEADY_SPREAD, save_points

    unsteady = sorted((p for p in raw.points if not p.is_steady), key=lambda p: -p.spread)
    if not unsteady:
        return
    save_points(part, raw.setting, [p for p in raw.points if p.is_steady])
    named = first_few([f"{p.name} {p.spread:.0%}" for p in unsteady], MAX_NAMED)
    raise UsageError(
        f"The repeats of {plural(len(unsteady), 'measurement')} of {len(raw.points)} lie more than "
        f"{MAX_STEADY_SPREAD:.0%} apart, so something else uses this machine: {named}. Run the same command on "
        "an idle machine, which measures these again alone, or pass --anyway."
    )


@contextmanager
def showing_progress(count: int) -> Iterator[Callable[[int, str], None]]:
    """Within ``with``, a function that shows how many measurements are done: as a bar in a terminal, else as lines."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from autopar.ir.terminal import progress_console
    from autopar.tools.cli.output import remark

    console = progress_console()
    if not console.is_interactive:
        shown: set[str] = set()

        def say(done: int, name: str) -> None:
            kind = name.split(" ")[0] + " between nodes" * name.endswith(" nodes")
            if kind and kind not in shown:
                shown.add(kind)
                remark(f"[{done + 1}/{count}] {kind}", err=True)

        yield say
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=count)
        yield lambda done, name: bar.update(task, completed=done, description=name)


def constants_table(constants: Sequence[Constant]) -> Table:
    """A table of constants with their errors and numbers of points."""
    from rich.table import Table

    from autopar.measure.machine.write_cost_model import value_text

    table = Table("constant", box=None, pad_edge=False)
    for head in ("value", "fit error", "of all", "points"):
        table.add_column(head, justify="right")
    for c in constants:
        error = "assumption" if c.assumption else f"{c.error:.1%}"
        of_all = f"{c.error_of_all:.1%}" if c.error_of_all else ""
        table.add_row(".".join(c.path), value_text(c), error, of_all, str(c.num_points))
    return table
