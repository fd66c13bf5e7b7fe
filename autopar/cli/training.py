"""A training run from flags to saved and verified weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

from autopar.api import parallelize
from autopar.cli.flags import BuildFlags, parse_kwargs
from autopar.cli.models import SIZE_ARGUMENTS, accepts, named_plan, sized
from autopar.cli.output import save_plan, show_plan
from autopar.cli.progress import TrainingProgress
from autopar.errors import TrainingError, UsageError
from autopar.ir import Plan
from autopar.ir.units import percent
from autopar.runtime import launched
from autopar.train import Data, Epoch, Recipe, accuracy, fit, load_data, load_weights, save_weights
from autopar.zoo import ModelSource

DEFAULT_SIDE = 32
WEIGHTS, PLAN, HISTORY = "model.safetensors", "plan.json", "history.jsonl"


@dataclass(frozen=True)
class Run:
    """What the flags of ``autopar train`` say. ``plan`` is given or None; so is ``devices``."""

    model: str
    build: BuildFlags
    data: str
    devices: int | None
    recipe: Recipe
    folder: Path
    plan: Plan | None
    constraints: Mapping[str, Any]


def run(asked: Run) -> None:
    """Train, save, and compare the saved weights in the unmodified model with the parallel one.

    Raises:
        UsageError: flags that contradict each other or the data.
        TrainingError: a loss was not finite, or the accuracies differ.
    """
    devices = number_of_devices(asked)
    leader = is_leader()
    source = ModelSource(asked.model, parse_kwargs(asked.build.model_kwargs))
    side = image_side(asked.build, source)
    data = load_data(asked.data, side, source.kwargs.get("in_chans", 3), asked.recipe.seed)
    source = sized(with_classes(source, data.num_classes), side)
    recipe = asked.recipe
    torch.manual_seed(recipe.seed)
    model = source.build("cpu")
    example = torch.empty(recipe.batch_size, *data.train_images.shape[1:], device="meta")
    scheduler = recipe.scheduler(len(data.train_labels))
    if leader:
        make_folder(asked.folder)
    with parallelize(
        model, devices, example, optimizer=recipe.optimizer, lr_scheduler=scheduler, plan=asked.plan,
        seed=recipe.seed, **asked.constraints,
    ) as pm:  # fmt: skip
        plan = named_plan(pm.plan, source)
        if leader:
            show_plan(plan)
            typer.echo(f"\n{data_text(asked.data, data, recipe)}\n")
        steps = recipe.steps_per_epoch(len(data.train_labels))
        with TrainingProgress(recipe.epochs, steps, asked.folder / HISTORY if leader else None) as progress:
            history = fit(pm, data, recipe, progress)
        state = pm.state_dict()
    if leader:
        save_plan(plan, asked.folder / PLAN)
        save_weights(state, asked.folder / WEIGHTS)
        verify(source, data, asked, history[-1], devices)


def verify(source: ModelSource, data: Data, asked: Run, last: Epoch, devices: int) -> None:
    """Load the saved weights into the unmodified model in this process and compare its accuracy.

    Raises:
        TrainingError: it is another one.
    """
    model = load_weights(source.build("cpu"), asked.folder / WEIGHTS)
    alone = accuracy(model, data, asked.recipe.batch_size)
    right, total = round(alone * len(data.test_labels)), len(data.test_labels)
    typer.echo(f"\ntest accuracy  {percent(last.accuracy, 2)}  on {devices} devices")
    typer.echo(
        f"               {percent(alone, 2)}  with the weights in the unmodified {source.name}, one process "
        f"({right} of {total} images)"
    )
    typer.echo(f"saved          {', '.join(str(asked.folder / name) for name in (WEIGHTS, PLAN, HISTORY))}")
    if alone != last.accuracy:
        raise TrainingError(
            f"The unmodified {source.name} gets {percent(alone, 2)} of the {total} test images right with the saved "
            f"weights, the parallel model got {percent(last.accuracy, 2)}. Run `autopar check` on it and report that."
        )


def number_of_devices(asked: Run) -> int:
    """As asked for, or those of the plan or of torchrun.

    Raises:
        UsageError: nobody says.
    """
    launch = launched()
    if asked.devices is not None:
        return asked.devices
    if asked.plan is not None:
        return asked.plan.mesh.devices
    if launch is not None:
        return launch.world
    raise UsageError("On how many devices? Pass --devices N, or --plan PLAN.json, or start it with torchrun.")


def is_leader() -> bool:
    """Whether this process prints and writes: the only one, or torchrun's first."""
    launch = launched()
    return launch is None or launch.rank == 0


def image_side(flags: BuildFlags, source: ModelSource) -> int:
    """Side of the images in pixels: asked for, or the model's argument, or small.

    Raises:
        UsageError: the model's argument is not a square's side.
    """
    given = next((source.kwargs[name] for name in SIZE_ARGUMENTS if name in source.kwargs), None)
    if flags.img_size is None and given is not None and not isinstance(given, int):
        raise UsageError(f"Images are square: write the size {given} as one number, or use --img-size.")
    return flags.img_size or given or DEFAULT_SIDE


def with_classes(source: ModelSource, num_classes: int) -> ModelSource:
    """The model with as many classes as the data, unless its arguments say otherwise.

    Raises:
        UsageError: they say fewer.
    """
    given = source.kwargs.get("num_classes")
    if given is not None and given < num_classes:
        raise UsageError(f"--model-kwargs num_classes={given}: the data has {num_classes} classes. Leave it out.")
    if given is not None or not accepts(source, "num_classes"):
        return source
    return replace(source, kwargs={**source.kwargs, "num_classes": num_classes})


def make_folder(folder: Path) -> None:
    """Create the folder for the results.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot make the folder {folder}: {error.strerror}. Choose another --output.") from error


def data_text(name: str, data: Data, recipe: Recipe) -> str:
    """One line on the data and the recipe."""
    channels, side = data.train_images.shape[1:3]
    return (
        f"{name}: {len(data.train_labels):,} training and {len(data.test_labels):,} test images of "
        f"{channels}×{side}×{side}, {data.num_classes} classes; {recipe.epochs} epochs of "
        f"{recipe.steps_per_epoch(len(data.train_labels))} steps"
    )
