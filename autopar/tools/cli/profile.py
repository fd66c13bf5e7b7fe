"""``autopar profile``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from autopar.measure.device import ProfileSetting
    from autopar.measure.machine.fit import Constant
    from autopar.measure.machine.points import MeasuredPoint
    from autopar.measure.machine.write_cost_model import RawMeasurements

DEFAULT_FILE = Path("machine.toml")
CPU_DEVICES = 2
MAX_NAMED = 8  # measurements whose spread is too large


def profile(
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Write the cost model to this TOML file. Of one that is there, name, link_name, devices_per_node, "
            "and [network], [reserve], [beside] and [calibration] are kept but for what was measured.",
            metavar="FILE",
        ),
    ] = DEFAULT_FILE,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the machine; by default the file's.", metavar="NAME")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help=f"Devices; all GPUs by default, {CPU_DEVICES} processes on CPU.", metavar="N"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="gloo (CPU) or nccl (GPU), by default what is here.", metavar="NAME")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure these again and keep the rest of FILE: capacity, launch, matmul, attention, convolution, "
            "depthwise, memory, optimizer, point-to-point, all-reduce, all-gather, reduce-scatter, all-to-all, beside.",
            metavar="KIND,…",
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Write the file although repeats spread, as on a machine in use.")
    ] = False,
) -> None:
    """Measure this machine in a few minutes into a cost model for --hardware.

    A run that was ended goes on where it was: points so far are in FILE.part.
    """
    import datetime

    import torch

    from autopar.cost.hardware.load import load_hardware
    from autopar.measure.device import profile_setting
    from autopar.measure.machine.cases import cases
    from autopar.measure.machine.fit import fit
    from autopar.measure.machine.measure import measure
    from autopar.measure.machine.preserved import preserved_sections
    from autopar.measure.machine.write_cost_model import RawMeasurements, cost_model_text
    from autopar.runtime.launch.devices import this_machine
    from autopar.tools.cli.bench import ended_by_sigterm
    from autopar.tools.cli.output import check_writable, show

    kinds = kinds_of(only)
    if output.suffix != ".toml":
        raise UsageError(f"-o {output} must end in .toml: --hardware knows a file by that.")
    if name is not None and not name.strip():
        raise UsageError("--name is empty. Give the machine a name, or leave it out.")
    if backend not in (None, "gloo", "nccl"):
        raise UsageError(f"--backend {backend!r} is unknown. It is gloo (CPU) or nccl (GPU).")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and backend != "gloo" else 0
    devices = devices or gpus or CPU_DEVICES
    machine = this_machine(devices, backend)
    if machine.launched is not None:
        raise UsageError("autopar profile starts its own processes: run it once, without torchrun or srun.")
    part = output.with_name(output.name + ".part")
    for path in (output, part):
        check_writable(path)
    setting = profile_setting(machine, devices)
    kept = preserved_sections(output, setting.device_type)
    points = reusable_points(output, part, setting, kinds)
    wanted = cases(setting.device_type, devices)
    known = {p.name for p in points}
    todo = [case for case in wanted if case.name not in known and (not kinds or case.kind in kinds)]
    try:
        with ended_by_sigterm(), showing_progress(len(todo)) as progress:
            measure(setting, todo, part, points, progress)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted; points so far are in {part}. The same command goes on from there.", err=True)
        raise
    raw = RawMeasurements(setting, points_in_order(part, setting, [case.name for case in wanted]))
    missing = [kind for kind in dict.fromkeys(c.kind for c in wanted) if kind not in {p.kind for p in raw.points}]
    if missing:
        typer.echo(
            f"Measured {len(todo)} points, kept in {part}. {output} needs {', '.join(missing)} too: "
            f"autopar profile -o {output}"
        )
        return
    constants = fit(raw.points, setting)
    kept = kept.without({constant.path for constant in constants})
    if not anyway:
        check_spread(raw, part)
    text = cost_model_text(name or kept.name or output.stem, raw, constants, datetime.date.today(), kept)
    output.write_text(text, encoding="utf-8")
    load_hardware(output)
    part.unlink()
    show([constants_table(constants)])
    if kept.tables:
        left = (f"[{table}] {' and '.join(numbers)}" for table, numbers in kept.tables.items())
        typer.echo(f"kept as they were: {', '.join(left)}")
    typer.echo(f"\nsaved to {output}; plan with it: autopar plan MODEL --devices {devices} --hardware {output}")


def kinds_of(texts: Sequence[str] | None) -> frozenset[str]:
    """The kinds in ``--only matmul,launch``; none where all are meant.

    Raises:
        UsageError: an unknown one, or the flag without any.
    """
    from autopar.measure.machine.cases import POINT_KINDS

    if texts is None:
        return frozenset()
    names = [n.strip() for text in texts for n in text.split(",") if n.strip()]
    unknown = [n for n in names if n not in POINT_KINDS]
    if unknown or not names:
        near = difflib.get_close_matches(unknown[0], POINT_KINDS, 1) if unknown else []
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"--only {','.join(texts)!r} names no kind.{hint} There are {', '.join(POINT_KINDS)}.")
    return frozenset(names)


def reusable_points(
    output: Path, part: Path, setting: ProfileSetting, kinds: frozenset[str]
) -> tuple[MeasuredPoint, ...]:
    """Points that need not be measured: of a run that was ended, or with --only the other kinds of the file itself.

    Raises:
        UsageError: the file of a run that was ended is no such file.
        HardwareError: the cost model's points cannot be read.
    """
    from autopar.measure.machine.resume import load_points
    from autopar.measure.machine.write_cost_model import raw_points

    kept = load_points(part, setting)
    if kept.note:
        typer.echo(kept.note, err=True)
    if kept.points or not kinds or not output.exists():
        return kept.points
    raw = raw_points(output)
    if raw is None or setting.differences(raw.setting):
        why = "no points" if raw is None else f"points of another setting ({setting.differences(raw.setting)})"
        typer.echo(f"{output} has {why}; it is measured anew.", err=True)
        return ()
    points = tuple(p for p in raw.points if p.kind not in kinds)
    typer.echo(f"Keeping {len(points)} points of {output}.", err=True)
    return points


def points_in_order(part: Path, setting: ProfileSetting, names: Sequence[str]) -> tuple[MeasuredPoint, ...]:
    """All points that were kept, in the order of measuring."""
    from autopar.measure.machine.resume import load_points

    found = {p.name: p for p in load_points(part, setting).points}
    return tuple(found[name] for name in names if name in found)


def check_spread(raw: RawMeasurements, part: Path) -> None:
    """Give up where repeats spread too much; a next run measures these again.

    Raises:
        UsageError: names them and their spread.
    """
    from autopar.ir.units import plural
    from autopar.measure.machine.points import MAX_STEADY_SPREAD
    from autopar.measure.machine.resume import save_points

    loose = sorted((p for p in raw.points if not p.is_steady), key=lambda p: -p.spread)
    if not loose:
        return
    save_points(part, raw.setting, [p for p in raw.points if p.is_steady])
    named = ", ".join(f"{p.name} {p.spread:.0%}" for p in loose[:MAX_NAMED])
    more = f" and {len(loose) - MAX_NAMED} more" if len(loose) > MAX_NAMED else ""
    raise UsageError(
        f"The repeats of {plural(len(loose), 'measurement')} of {len(raw.points)} lie more than "
        f"{MAX_STEADY_SPREAD:.0%} apart, so something else uses this machine: {named}{more}. Run the same command on an "
        "idle machine, which measures "
        "these again alone, or pass --anyway."
    )


@contextmanager
def showing_progress(count: int) -> Iterator[Callable[[int, str], None]]:
    """Within ``with``, what shows how many measurements are done: a bar in a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        shown: set[str] = set()

        def say(done: int, name: str) -> None:
            kind = name.split(" ")[0]
            if kind and kind not in shown:
                shown.add(kind)
                typer.echo(f"[{done + 1}/{count}] {kind}", err=True)

        yield say
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=count)
        yield lambda done, name: bar.update(task, completed=done, description=name)


def constants_table(constants: Sequence[Constant]) -> Table:
    """What was fitted, how well to large points and to all, and from how many."""
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
