"""``autopar bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.command import takes_flags
from autopar.cli.flags import MODEL_HELP, ModelFlags, PlanFlags, RunFlags

DEFAULT_BATCH = 32


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
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after a warm-up.", metavar="N")] = 10,
    seed: Annotated[int, typer.Option(help="Of weights and images.", metavar="N")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the result as JSON.", metavar="FILE")
    ] = None,
) -> None:
    """Time MODEL's plan on this machine beside the plain PyTorch loop and its own bubble bound."""
    constraints = plan_flags.constraints() | run_flags.constraints()
    import torch

    from autopar.api import example_call
    from autopar.bench import run_bench
    from autopar.cli.bench_table import bench_parts
    from autopar.cli.inputs import parse_inputs
    from autopar.cli.models import model_source
    from autopar.cli.output import show
    from autopar.errors import UsageError

    source = model_source(model, model_flags, batch or DEFAULT_BATCH)
    inputs = parse_inputs(model_flags.inputs, batch)
    if len(inputs) > 1 or any(i.dtype != torch.float32 for i in inputs):
        raise UsageError("bench feeds a model random images: --input takes one shape of float32 there.")
    torch.manual_seed(seed)
    built = source.build("cpu")
    if inputs:
        shape = torch.Size(inputs[0].shape)
    else:
        shape = example_call(built, None, batch or DEFAULT_BATCH, source.input_shape).leaves[0].shape
    with torch.no_grad():
        logits = built.eval()(torch.zeros(1, *shape[1:]))
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise UsageError(f"bench trains a classifier; {model} does not return one row of logits per image.")
    images, labels = torch.randn(shape), torch.randint(0, logits.shape[1], shape[:1])
    result = run_bench(
        built,
        images,
        labels,
        devices=devices,
        steps=steps,
        progress=lambda text: typer.echo(f"measuring: {text}", err=True),
        **constraints,
    )
    show(bench_parts(model, result))
    if output is not None:
        try:
            output.write_text(result.to_json())
        except OSError as error:
            raise UsageError(f"Cannot write the result to {output}: {error.strerror}.") from error
