"""``autopar bench``."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import UsageError
from autopar.tools.cli.command import ReportedInterrupt, takes_flags
from autopar.tools.cli.flags import JsonFlag, ModelArgument, ModelFlags, PlanFlags, RunFlags
from autopar.tools.cli.json_output import prints_json, show_json

if TYPE_CHECKING:
    from autopar.tools.bench.request import BenchRequest
    from autopar.tools.bench.result import BenchResult
    from autopar.tools.bench.run import BenchOutput

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class BenchFlags:
    """Baselines to run, their batch and their steps."""

    batch: Annotated[
        int | None,
        typer.Option("--batch", "--batch-size", min=1, help=f"Global batch; {DEFAULT_BATCH} by default.", metavar="N"),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each baseline.", metavar="N")] = 10
    warmup: Annotated[int, typer.Option(min=1, help="Untimed steps before them.", metavar="N")] = 5
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Baselines to run: plain, single, autopar, uniform, ddp, fsdp2, 1f1b, interleaved, dtensor; "
            "plain:whole is plain with the whole model compiled, beside plain:blocks and plain:graphs. By default all, "
            "but uniform only if the plan has several stages, and dtensor only if it has tensor parallelism.",
            metavar="NAME,…",
        ),
    ] = None
    skip: Annotated[list[str] | None, typer.Option(help="Baselines to leave out.", metavar="NAME,…")] = None
    microbatch_sizes: Annotated[
        str | None,
        typer.Option(help="Microbatch sizes to try with torch.distributed.pipelining, such as 16,32.", metavar="N,…"),
    ] = None
    limit: Annotated[
        float, typer.Option(min=1, help="Time limit of each variant of a baseline, in seconds.", metavar="N")
    ] = 600.0
    seed: Annotated[int, typer.Option(help="Seed of weights and images.", metavar="N")] = 0


@dataclass(frozen=True)
class OutputFlags:
    """The files to write, and whether predictions are calibrated instead."""

    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the result as JSON; updated after every row.", metavar="FILE"),
    ] = None
    png: Annotated[Path | None, typer.Option(help="Write a bar chart of the result as PNG.", metavar="FILE")] = None
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Compare predicted with measured steps and peaks, for the best plan of every mesh; runs no other "
            "baselines. Adds to the file of -o.",
        ),
    ] = False
    by_kernel: Annotated[
        bool,
        typer.Option(
            "--by-kernel",
            help="Compare the kernels of a step on one GPU with the prices of its operations; runs no other baselines.",
        ),
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a measured step of the plan as a timeline for ui.perfetto.dev.", metavar="FILE"),
    ] = None

    def check(self, flags: BenchFlags) -> None:
        """Raise a UsageError if flags contradict each other, or a file cannot be written later."""
        from autopar.tools.cli.output import check_files
        from autopar.tools.report.figure import needed_figure

        if self.calibrate or self.by_kernel:
            mode = "--calibrate" if self.calibrate else "--by-kernel"
            excluded = {"--only": flags.only, "--skip": flags.skip, "--microbatch-sizes": flags.microbatch_sizes}
            excluded |= {"--trace": self.trace}
            excluded |= {} if self.calibrate else {"--png": self.png}
            for flag, value in excluded.items():
                if value:
                    raise UsageError(f"{mode} runs plans alone: leave {flag} out.")
            if self.calibrate and self.by_kernel:
                raise UsageError("--calibrate and --by-kernel are different measurements: leave one out.")
        only, skip = parse_names("--only", flags.only), parse_names("--skip", flags.skip)
        if self.trace is not None and ("autopar" in skip or (only and "autopar" not in only)):
            raise UsageError("--trace shows a step of the plan: let autopar take part.")
        if self.png is not None:
            needed_figure()
        check_files({"-o": self.output, "--png": self.png, "--trace": self.trace})

    def save(self, result: BenchResult) -> None:
        """Write the JSON file, if there is to be one."""
        from autopar.tools.cli.output import write

        if self.output is not None:
            write(self.output, result.to_json())

    def report(self, output: BenchOutput, as_json: bool) -> list[Path]:
        """Print the tables, draw the picture and write the trace; returns all files that have been written."""
        from autopar.tools.cli.output import show, write
        from autopar.tools.report.bench_picture import figure_of
        from autopar.tools.report.bench_table import bench_parts
        from autopar.tools.report.figure import save_figure

        if as_json:
            show_json(output.result)
        else:
            show(bench_parts(output.result))
        if self.png is not None:
            save_figure(figure_of(output.result), self.png)
        if self.trace is not None and output.trace is not None:
            write(self.trace, json.dumps(output.trace))
        written = (self.output, self.png, self.trace if output.trace is not None else None)
        return [path for path in written if path is not None]


@takes_flags
@prints_json
def bench(
    model: ModelArgument,
    devices: Annotated[int, typer.Option(min=1, help="Devices to split the model over.", metavar="N")],
    model_flags: ModelFlags,
    plan_flags: PlanFlags,
    run_flags: RunFlags,
    bench_flags: BenchFlags,
    output_flags: OutputFlags,
    as_json: JsonFlag = False,
) -> None:
    """Time MODEL's plan on this machine, and baselines: a plain loop, DDP, FSDP2, pipelining, DTensor, uniform cuts."""
    request = bench_request(model, devices, model_flags, plan_flags, run_flags, bench_flags)
    output_flags.check(bench_flags)
    if output_flags.calibrate:
        run_calibration(request, output_flags, as_json)
    elif output_flags.by_kernel:
        run_by_kernel(request, output_flags, as_json)
    else:
        run_baselines(request, output_flags, as_json)


def bench_request(
    model: str,
    devices: int,
    model_flags: ModelFlags,
    plan_flags: PlanFlags,
    run_flags: RunFlags,
    flags: BenchFlags,
) -> BenchRequest:
    """The request that the flags describe.

    Raises:
        UsageError: a flag cannot be read, or the model does not classify images of the shape given.
    """
    from autopar.tools.cli.early_checks import check_request
    from autopar.tools.cli.inputs import num_samples, parse_inputs

    constraints = plan_flags.constraints() | run_flags.constraints() | model_flags.layout()
    sizes = None if flags.microbatch_sizes is None else parse_sizes(flags.microbatch_sizes)
    batch = flags.batch or DEFAULT_BATCH
    inputs = parse_inputs(model_flags.inputs, flags.batch)
    check_request(model, devices, num_samples(inputs, batch), constraints)
    import torch

    from autopar.api.planning.plan import example_call
    from autopar.runtime.launch.devices import this_machine
    from autopar.tools.bench.request import BenchRequest, num_classes
    from autopar.tools.cli.models import model_source

    source = model_source(model, model_flags, batch)
    if len(inputs) > 1 or any(i.dtype != "float32" for i in inputs):
        raise UsageError("bench feeds a model random images: --input takes one shape of float32 there.")
    meta_model = source.build("meta")
    if inputs:
        shape = torch.Size(inputs[0].shape)
    else:
        shape = example_call(meta_model, None, batch, source.expected_shape(meta_model, batch)).leaves[0].shape
    compiles = run_flags.compile
    if compiles is None:
        compiles = this_machine(devices, run_flags.backend).device_type == "cuda"
    return BenchRequest(
        source=source,
        shape=tuple(shape),
        classes=num_classes(meta_model, shape),
        devices=devices,
        constraints=constraints,
        steps=flags.steps,
        warmup=flags.warmup,
        seed=flags.seed,
        compile=compiles,
        only=parse_names("--only", flags.only),
        skip=parse_names("--skip", flags.skip),
        microbatch_sizes=sizes,
        limit_seconds=flags.limit,
        command=shlex.join(["autopar", *sys.argv[1:]]),
    )


def run_baselines(request: BenchRequest, outputs: OutputFlags, as_json: bool) -> None:
    """Run the bench, show and write its result; after Ctrl-C the rows so far.

    Raises:
        Exit: no baseline has measurements.
    """
    from autopar.tools.bench.run import BenchInterrupted, run_bench
    from autopar.tools.cli.output import remark
    from autopar.train import exits_on_sigterm

    try:
        with exits_on_sigterm():
            output = run_bench(request, partial(remark, err=True), outputs.save)
    except BenchInterrupted as error:
        written = []
        if error.output.result.rows:
            outputs.save(error.output.result)  # again: Ctrl-C may have come while the file was being written
            written = outputs.report(error.output, as_json)
        what = f"rows so far in {', '.join(map(str, written))}" if written else "nothing was written"
        typer.echo(f"Interrupted {error}; {what}.", err=True)
        raise ReportedInterrupt from error
    except KeyboardInterrupt as error:
        typer.echo("Interrupted before the first baseline; nothing was written.", err=True)
        raise ReportedInterrupt from error
    outputs.report(output, as_json)
    if outputs.trace is not None and output.trace is None:
        typer.echo(f"No step of the plan was measured, so {outputs.trace} is not written.", err=True)
    if all(row.reason is not None for row in output.result.rows):
        raise typer.Exit(1)


def run_calibration(request: BenchRequest, outputs: OutputFlags, as_json: bool) -> None:
    """Measure, show, draw and save the errors of predictions; the file has all plans so far after each."""
    from autopar.tools.bench.calibration import Calibration, band_text, calibrate
    from autopar.tools.cli.output import remark, show, write
    from autopar.tools.report.bench_table import calibration_parts
    from autopar.tools.report.calibration_picture import figure_of
    from autopar.tools.report.figure import save_figure
    from autopar.train import exits_on_sigterm

    path = outputs.output
    earlier = Calibration.load(path) if path is not None and path.exists() and path.stat().st_size else None

    def save(calibration: Calibration) -> None:
        if path is not None:
            write(path, calibration.to_json())

    with exits_on_sigterm():
        result = calibrate(request, partial(remark, err=True), save, earlier)
    if as_json:
        show_json(result)
    else:
        show(calibration_parts(result))
    if result.time.worst < 1:
        remark(
            f"\nPlans print this band when their cost model, or a copy of it, has\n\n{band_text(result, date.today())}"
        )
    if outputs.png is not None:
        save_figure(figure_of(result), outputs.png)


def run_by_kernel(request: BenchRequest, outputs: OutputFlags, as_json: bool) -> None:
    """Measure, save and show the kernels of one step and the prices of its operations."""
    from autopar.tools.bench.by_kernel import bench_by_kernel
    from autopar.tools.cli.output import remark, show, write
    from autopar.tools.report.by_kernel_table import by_kernel_parts
    from autopar.train import exits_on_sigterm

    with exits_on_sigterm():
        result = bench_by_kernel(request, partial(remark, err=True))
    if outputs.output is not None:
        write(outputs.output, result.to_json())
    if as_json:
        show_json(result)
    else:
        show(by_kernel_parts(result))


def parse_names(flag: str, texts: list[str] | None) -> tuple[str, ...]:
    """The names in ``--only ddp,fsdp2 --only 1f1b``.

    Raises:
        UsageError: the flag was given without a name.
    """
    names = tuple(name.strip() for text in texts or () for name in text.split(",") if name.strip())
    if texts and not names:
        raise UsageError(f"{flag} {','.join(texts)!r} names no baseline. Write names such as ddp,fsdp2.")
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """The numbers in ``16,32``.

    Raises:
        UsageError: a word is not a whole number of at least 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"Cannot read --microbatch-sizes {text!r}. Write numbers of samples, such as 16,32.")
    return tuple(sorted({int(word) for word in words}))
