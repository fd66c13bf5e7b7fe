"""``autopar plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import DEFAULT_BATCH, MODEL_HELP, ModelFlags, PlanFlags


@takes_flags
def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    devices: Annotated[int, typer.Option(min=1, help="Devices to split the model over.", metavar="N")],
    model_flags: ModelFlags,
    plan_flags: PlanFlags,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "--batch-size", min=1, help=f"Global batch; {DEFAULT_BATCH} by default.", metavar="N"),
    ] = None,
    opt: Annotated[
        str | None,
        typer.Option(help="Optimizer to plan for, by timm's name, such as sgd; AdamW by default.", metavar="NAME"),
    ] = None,
    model_ema: Annotated[
        bool, typer.Option("--model-ema", help="Plan for training with a moving average of the weights (EMA).")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the plan as JSON.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
) -> None:
    """Find the best way to split MODEL; needs no GPU and no weights."""
    constraints = plan_flags.constraints() | model_flags.layout()
    import autopar
    from autopar.tools.cli.inputs import Input, example, parse_inputs
    from autopar.tools.cli.models import model_source
    from autopar.tools.cli.output import check_writable, save_plan, show_plan
    from autopar.tools.cli.train_flags import EMA_DECAY
    from autopar.train import timm_average, timm_optimizer

    if output is not None:
        check_writable(output)
    source = model_source(model, model_flags, batch or DEFAULT_BATCH)
    inputs = example(parse_inputs(model_flags.inputs, batch), Input.empty)
    optimizer = timm_optimizer(source.build("meta"), opt, None) if opt is not None else None
    ema = timm_average(EMA_DECAY) if model_ema else None
    found = autopar.plan(source, devices, inputs, batch_size=batch, optimizer=optimizer, ema=ema, **constraints)
    if output is not None:
        save_plan(found, output)
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    show_plan(found)
    if output is not None:
        typer.echo(f"\nsaved to {output}")
