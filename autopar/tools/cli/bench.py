"""``autopar bench``."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import UsageError
from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import MODEL_HELP, ModelFlags, PlanFlags, RunFlags

if TYPE_CHECKING:
    from autopar.tools.bench.run import BenchRequest

DEFAULT_BATCH = 32
TERMINATED = 143  # what shells report for SIGTERM


@takes_flags
def bench(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    devices: Annotated[int, typer.Option(min=1, help="Devices to split the model over.", metavar="N")],
    model_flags: ModelFlags,
    plan_flags: PlanFlags,
    run_flags: RunFlags,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "--batch-size", min=1, help=f"Global batch; {DEFAULT_BATCH} by default.", metavar="N"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each contestant.", metavar="N")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.", metavar="N")] = 5,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Contestants to run: plain, single, autopar, uniform, ddp, fsdp2, 1f1b, interleaved, dtensor. By "
            "default all, uniform and dtensor where the plan has stages and tensor parallelism.",
            metavar="NAME,…",
        ),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Contestants to leave out.", metavar="NAME,…")] = None,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option(help="Microbatches to try with torch.distributed.pipelining, such as 16,32.", metavar="N,…"),
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Model and images in this memory format, for all.")
    ] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for each variant of a contestant.", metavar="N")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of weights and images.", metavar="N")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the result as JSON, after every row.", metavar="FILE")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the result.", metavar="FILE")] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Instead: the plan and the best of every other mesh, predicted against measured. Adds to -o.",
        ),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a step of the plan as a timeline for ui.perfetto.dev.", metavar="FILE")
    ] = None,
) -> None:
    """Time MODEL's plan on this machine beside the plain loop, DDP, FSDP2, pipelining, DTensor and uniform cuts."""
    constraints = plan_flags.constraints() | run_flags.constraints()
    sizes = None if microbatch_sizes is None else parse_sizes(microbatch_sizes)
    import torch

    from autopar.api.planning.plan import example_call
    from autopar.runtime.launch.devices import this_machine
    from autopar.tools.bench.result import BenchResult
    from autopar.tools.bench.run import BenchInterrupted, BenchOutput, BenchRequest, num_classes, run_bench
    from autopar.tools.cli.inputs import parse_inputs
    from autopar.tools.cli.models import model_source
    from autopar.tools.cli.output import check_files, show, write
    from autopar.tools.report.bench_picture import draw
    from autopar.tools.report.bench_table import bench_parts
    from autopar.tools.report.figure import needed_figure

    source = model_source(model, model_flags, batch or DEFAULT_BATCH)
    inputs = parse_inputs(model_flags.inputs, batch)
    if len(inputs) > 1 or any(i.dtype != torch.float32 for i in inputs):
        raise UsageError("bench feeds a model random images: --input takes one shape of float32 there.")
    built = source.build("meta")
    if inputs:
        shape = torch.Size(inputs[0].shape)
    else:
        shape = example_call(built, None, batch or DEFAULT_BATCH, source.input_shape).leaves[0].shape
    taking_part, left_out = parse_names("--only", only), parse_names("--skip", skip)
    if calibrate:
        for flag, value in (("--only", only), ("--skip", skip), ("--microbatch-sizes", sizes), ("--trace", trace)):
            if value:
                raise UsageError(f"--calibrate runs plans alone: leave {flag} out.")
    if trace is not None and ("autopar" in left_out or (taking_part and "autopar" not in taking_part)):
        raise UsageError("--trace shows a step of the plan: let autopar take part.")
    if png is not None:
        needed_figure()
    check_files({"-o": output, "--png": png, "--trace": trace})
    request = BenchRequest(
        source=source,
        shape=tuple(shape),
        classes=num_classes(built, shape),
        devices=devices,
        constraints=constraints,
        steps=steps,
        warmup=warmup,
        seed=seed,
        compile=this_machine(devices, run_flags.backend).device_type == "cuda"
        if run_flags.compile is None
        else run_flags.compile,
        channels_last=channels_last,
        only=taking_part,
        skip=left_out,
        microbatch_sizes=sizes,
        limit_seconds=limit,
        command=shlex.join(["autopar", *sys.argv[1:]]),
    )

    if calibrate:
        run_calibration(request, output, png)
        return

    def keep(result: BenchResult) -> None:
        if output is not None:
            write(output, result.to_json())

    def present(finished: BenchOutput) -> list[Path]:
        """Show and draw what there is; the files that have it."""
        show(bench_parts(finished.result))
        if png is not None:
            draw(finished.result, png)
        if trace is not None and finished.trace is not None:
            write(trace, json.dumps(finished.trace))
        return [path for path in (output, png, trace if finished.trace is not None else None) if path is not None]

    try:
        with ended_by_sigterm():
            finished = run_bench(request, lambda text: typer.echo(text, err=True), keep)
    except BenchInterrupted as error:
        written = []
        if error.finished.result.rows:
            keep(error.finished.result)  # the whole file, whatever Ctrl-C came in the middle of
            written = present(error.finished)
        what = f"rows so far in {', '.join(map(str, written))}" if written else "nothing was written"
        typer.echo(f"Interrupted {error}; {what}.", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("Interrupted before the first contestant; nothing was written.", err=True)
        raise
    present(finished)
    if trace is not None and finished.trace is None:
        typer.echo(f"No step of the plan was measured, so {trace} is not written.", err=True)
    if all(row.reason is not None for row in finished.result.rows):
        raise typer.Exit(1)


def run_calibration(request: BenchRequest, output: Path | None, png: Path | None) -> None:
    """Show, draw and save how far predictions are off; the file has all plans so far after each."""
    from autopar.tools.bench.calibration import Calibration, band_text, calibrate
    from autopar.tools.cli.output import show, write
    from autopar.tools.report.calibration_picture import draw
    from autopar.tools.report.calibration_table import calibration_parts

    earlier = Calibration.load(output) if output is not None and output.exists() and output.stat().st_size else None

    def keep(found: Calibration) -> None:
        if output is not None:
            write(output, found.to_json())

    with ended_by_sigterm():
        result = calibrate(request, lambda text: typer.echo(text, err=True), keep, earlier)
    show(calibration_parts(result))
    if result.time.worst < 1:
        typer.echo(
            f"\nPlans print this band when their cost model, or a copy of it, has\n\n{band_text(result, date.today())}"
        )
    if png is not None:
        draw(result, png)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within ``with``, SIGTERM ends the command as an exception does: folders are removed and processes ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM, once."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def parse_names(flag: str, texts: list[str] | None) -> tuple[str, ...]:
    """The names in ``--only ddp,fsdp2 --only 1f1b``.

    Raises:
        UsageError: the flag is there without a name.
    """
    names = tuple(name.strip() for text in texts or () for name in text.split(",") if name.strip())
    if texts and not names:
        raise UsageError(f"{flag} {','.join(texts)!r} names no contestant. Write names such as ddp,fsdp2.")
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """The numbers in ``16,32``.

    Raises:
        UsageError: not whole numbers of at least 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"Cannot read --microbatch-sizes {text!r}. Write numbers of samples, such as 16,32.")
    return tuple(sorted({int(word) for word in words}))
