"""``autopar train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.command import takes_flags
from autopar.cli.flags import DEFAULT_BATCH, MODEL_HELP, BuildFlags, PlanFlags, RunFlags
from autopar.errors import UsageError


@takes_flags
def train(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    data: Annotated[str, typer.Option(help="Data set: digits (1,797 images, no download).", metavar="NAME")],
    build_flags: BuildFlags,
    plan_flags: PlanFlags,
    run_flags: RunFlags,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to train on; by default the plan's, or torchrun's processes.", metavar="N"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.", metavar="N")] = 30,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            "--batch",
            "-b",
            min=1,
            help=f"Global batch; the plan's, or {DEFAULT_BATCH}.",
            metavar="N",
        ),
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="Peak of the one-cycle learning rate.", metavar="X")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of AdamW.", metavar="X")] = 0.05,
    clip_grad: Annotated[
        float | None, typer.Option(min=0, help="Largest norm of all gradients together.", metavar="X")
    ] = None,
    shift: Annotated[int, typer.Option(min=0, help="Move training images by up to N pixels.", metavar="N")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, split and shuffling.", metavar="N")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results; runs/MODEL by default.", metavar="DIR"),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Use this plan instead of making one.", metavar="PLAN.json")] = None,
) -> None:
    """Train MODEL on images over N devices, and show that its weights work in the unmodified model."""
    from autopar.cli.training import Run, run
    from autopar.ir import Plan
    from autopar.train import Recipe

    constraints = plan_flags.constraints() | run_flags.constraints()
    given = Plan.load(plan) if plan is not None else None
    if given is not None and plan_flags.constraints():
        raise UsageError(f"--plan decides already; leave out {', '.join(plan_flags.constraints())}.")
    batch = batch_size or (given.batch if given is not None else DEFAULT_BATCH)
    recipe = Recipe(epochs, batch, lr, weight_decay, seed, shift)
    if clip_grad is not None:
        constraints["clip_grad_norm"] = clip_grad
    folder = output or Path("runs") / model.replace(":", "_")
    run(Run(model, build_flags, data, devices, recipe, folder, given, constraints))
