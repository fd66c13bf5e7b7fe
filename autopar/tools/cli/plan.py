"""``autopar plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import DEFAULT_BATCH, JsonFlag, ModelArgument, ModelFlags, PlanFlags
from autopar.tools.cli.json_output import prints_json, show_json


@takes_flags
@prints_json
def plan(
    model: ModelArgument,
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
    as_json: JsonFlag = False,
) -> None:
    """Find the best way to split MODEL; needs no GPU and no weights."""
    from autopar.cost.hardware.load import hardware_names, load_hardware
    from autopar.ir.status import showing_status
    from autopar.tools.cli.early_checks import check_request
    from autopar.tools.cli.inputs import Input, example, num_samples, parse_inputs
    from autopar.tools.cli.output import check_writable, remark, save_plan, show_plan

    constraints = plan_flags.constraints() | model_flags.layout()
    inputs = parse_inputs(model_flags.inputs, batch)
    check_request(model, devices, num_samples(inputs, batch or DEFAULT_BATCH), constraints)
    if output is not None:
        check_writable(output)
    with showing_status("importing torch"):
        import autopar
        from autopar.tools.cli.models import model_source

        source = model_source(model, model_flags, batch or DEFAULT_BATCH)
        optimizer = ema = None
        if opt is not None or model_ema:  # 0.2 s of imports
            from autopar.tools.cli.train_flags import EMA_DECAY
            from autopar.train import timm_average, timm_optimizer

            optimizer = timm_optimizer(source.build("meta"), opt, None) if opt is not None else None
            ema = timm_average(EMA_DECAY) if model_ema else None
        found = autopar.plan(
            source, devices, example(inputs, Input.empty), batch_size=batch, optimizer=optimizer, ema=ema, **constraints
        )
    if output is not None:
        save_plan(found, output)
    if as_json:
        show_json(found.to_json())
    else:
        show_plan(found)
        if plan_flags.hardware is None and found.hardware.device_type == "cpu":
            gpus = [name for name in hardware_names() if load_hardware(name).device_type == "cuda"]
            remark(f"\nThere is no GPU here: this plan is for processors. For GPUs: --hardware {' or '.join(gpus)}.")
    if output is not None:
        remark(f"\nsaved to {output}")
