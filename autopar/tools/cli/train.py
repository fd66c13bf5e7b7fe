"""``autopar train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import UsageError
from autopar.tools.cli.command import takes_flags
from autopar.tools.cli.config import ConfigFlag
from autopar.tools.cli.flags import DEFAULT_BATCH, BuildFlags, JsonFlag, ModelArgument, PlanFlags, RunFlags
from autopar.tools.cli.json_output import prints_json
from autopar.tools.cli.train_flags import (
    AugmentationFlags,
    DataFlags,
    OptimizerFlags,
    RegularizationFlags,
    ScheduleFlags,
    WeightsFlags,
)
from autopar.tools.cli.train_tracking import TrackingFlags
from autopar.tools.cli.unused_flags import refuse_idle, refuse_training_flags


@takes_flags
@prints_json
def train(
    context: typer.Context,
    model: ModelArgument,
    data_flags: DataFlags,
    weights_flags: WeightsFlags,
    augmentation_flags: AugmentationFlags,
    optimizer_flags: OptimizerFlags,
    schedule_flags: ScheduleFlags,
    regularization_flags: RegularizationFlags,
    tracking_flags: TrackingFlags,
    build_flags: BuildFlags,
    plan_flags: PlanFlags,
    run_flags: RunFlags,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices to train on; by default the plan's, torchrun's processes, all GPUs here, or one CPU process.",
            metavar="N",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.", metavar="N")] = 30,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            "--batch",
            "-b",
            min=1,
            help="Global batch: images of one update, over all devices and accumulation steps; "
            f"by default the plan's, or {DEFAULT_BATCH}.",
            metavar="N",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Seed of weights, data split, shuffling and all other randomness.", metavar="N"
        ),
    ] = 0,
    val_only: Annotated[
        bool,
        typer.Option("--val-only", help="Evaluate on the test images, print loss and accuracies, and train nothing."),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Resume from a checkpoint: its folder, or the --output of an earlier run; auto goes on with the run "
            "in --output if there is one, and starts it otherwise.",
            metavar="PATH|auto",
        ),
    ] = None,
    checkpoint_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Save the last checkpoint every N updates, besides after each epoch.", metavar="N"),
    ] = None,
    keep: Annotated[
        int,
        typer.Option(min=1, help="Last checkpoints to keep; `autopar verify` lists them.", metavar="N"),
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results; runs/MODEL by default.", metavar="DIR"),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete an earlier run in --output instead of refusing to start."),
    ] = False,
    plan: Annotated[Path | None, typer.Option(help="Use this plan instead of making one.", metavar="PLAN.json")] = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Train MODEL on an image data set over N devices, and show that its weights work in the unmodified model."""
    from autopar.ir.plan import Plan
    from autopar.runtime.launch.environment import launched
    from autopar.tools.cli.early_checks import check_data, check_request

    del config  # its values are the other flags' by now
    if val_only:
        refuse_training_flags(context)
    refuse_idle(optimizer_flags, schedule_flags, regularization_flags, augmentation_flags, tracking_flags, epochs)
    constraints = plan_flags.constraints() | optimizer_flags.precision(plan_flags.precision)
    given = Plan.load(plan) if plan is not None else None
    if given is None or build_flags.channels_last is False:  # with a plan, --channels-last is the model's format alone
        constraints |= build_flags.layout()
    if given is not None and constraints:
        raise UsageError(f"--plan decides already; leave out {', '.join(constraints)}.")
    constraints |= run_flags.constraints() | optimizer_flags.clipping()
    accumulated = optimizer_flags.grad_accum_steps
    batch = batch_size or (given.batch * accumulated if given is not None else DEFAULT_BATCH)
    folder = output or Path("runs") / model.replace(":", "_")
    launch = launched()
    world = launch.world if launch is not None else None
    devices = devices or (given.mesh.devices if given is not None else world)
    check_data(data_flags.data, data_flags.data_dir, data_flags.download)
    # `run` refuses a batch that is no multiple of the accumulation steps.
    check_request(model, None if batch % accumulated else devices, batch // accumulated, constraints)
    from autopar.tools.cli.train_request import Run  # imports torch
    from autopar.tools.cli.train_run import run

    run(
        Run(
            model, build_flags, weights_flags, data_flags, augmentation_flags, optimizer_flags, schedule_flags,
            regularization_flags, tracking_flags, devices, epochs, batch, seed, val_only, resume, checkpoint_steps,
            keep, folder, overwrite, given, constraints, as_json, context.params,
        )
    )  # fmt: skip
