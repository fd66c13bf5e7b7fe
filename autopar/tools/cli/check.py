"""``autopar check``."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from autopar.errors import MicrobatchWarning
from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.flags import JsonFlag, ModelArgument, ModelFlags, PlanFlags, RunFlags
from autopar.tools.cli.json_output import prints_json, show_json

DEFAULT_BATCH = 8  # small, because every step runs twice, once on one device


@takes_flags
@prints_json
def check(
    model: ModelArgument,
    devices: Annotated[int, typer.Option(min=1, help="Devices to split the model over.", metavar="N")],
    model_flags: ModelFlags,
    plan_flags: PlanFlags,
    run_flags: RunFlags,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "--batch-size", min=1, help=f"Global batch; {DEFAULT_BATCH} by default.", metavar="N"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="AdamW steps to compare.", metavar="N")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.", metavar="N")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Prove on this machine that MODEL computes the same on N devices as on one.

    Stages run eagerly, unless --compile is given: kernels of torch.compile round differently.
    """
    from autopar.tools.cli.early_checks import check_request
    from autopar.tools.cli.inputs import Input, example, num_samples, parse_inputs

    constraints = plan_flags.constraints() | run_flags.constraints() | model_flags.layout()
    inputs = parse_inputs(model_flags.inputs, batch)
    check_request(model, devices, num_samples(inputs, batch or DEFAULT_BATCH), constraints)
    import torch

    from autopar.api.model_source import in_channels_last
    from autopar.api.planning.plan import example_call
    from autopar.tools.cli.models import model_source, named_plan
    from autopar.tools.cli.output import show
    from autopar.tools.parity.compare import compare
    from autopar.tools.report.parity_table import parity_numbers, parity_parts
    from autopar.trace.call import as_call

    source = model_source(model, model_flags, batch or DEFAULT_BATCH)
    torch.manual_seed(seed)
    built = source.build("cpu")
    x = example(inputs, Input.drawn)
    if x is None:
        size = batch or DEFAULT_BATCH
        x = torch.randn(example_call(built, None, size, source.expected_shape(built, size)).leaves[0].shape)
    if source.channels_last:
        x = in_channels_last(x)
    samples = as_call(built, x).batch
    with warnings.catch_warnings():
        if not {"microbatches", "microbatch_size"} & constraints.keys():
            # Several microbatches fill the pipeline; batch norm needs at least two samples in each.
            constraints["microbatch_size"] = min(samples, max(2, -(-samples // devices)))
            warnings.simplefilter("ignore", MicrobatchWarning)  # the user did not choose this size
        parity = compare(built, x, devices=devices, steps=steps, **constraints)
    plan = named_plan(parity.plan, source)
    if as_json:
        show_json(parity_numbers(parity, plan))
    else:
        show(parity_parts(parity, plan))
    if not parity.ok:
        raise typer.Exit(1)
