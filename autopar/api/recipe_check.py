"""The callables that a user passes to parallelize, checked before the planner runs and any worker starts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import UsageError
from autopar.ir.graph import Graph
from autopar.ir.pytree import flatten, path_text
from autopar.ir.units import first_few, of_type, plural
from autopar.runtime.engine.closure_guard import closure_tensors
from autopar.runtime.optim.build import made
from autopar.runtime.optim.lr_scheduler import scheduler_of
from autopar.runtime.optim.probe import probe_context, small_weight
from autopar.runtime.spec import TrainingRecipe

MAX_NAMED = 3  # tensors that an error lists
EXAMPLES = {
    "loss_fn": "loss_fn(output, target), such as torch.nn.functional.mse_loss",
    "optimizer": "a callable that builds one from parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)",
    "lr_scheduler": "a callable that builds one from an optimizer, such as "
    "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)",
    "ema": "a callable that builds averages from a module, such as "
    "functools.partial(timm.utils.ModelEmaV3, decay=0.999)",
}


def check_recipe(recipe: TrainingRecipe, model: nn.Module) -> None:
    """Check what can be said of the user's callables without a call.

    Raises:
        UsageError: one of them is no callable, the optimizer has nothing to train, or ``loss_fn`` reads tensors that
            nothing would train.
    """
    for name, example in EXAMPLES.items():
        value = getattr(recipe, name)
        if value is not None and not callable(value):
            raise UsageError(f"{name}= is {of_type(value)}, which cannot be called. It must be {example}.")
    if isinstance(recipe.loss_fn, type):
        name = recipe.loss_fn.__name__
        raise UsageError(f"loss_fn={name} is a class. Pass an object of it: loss_fn={name}().")
    if recipe.lr_scheduler is not None and recipe.optimizer is None:
        raise UsageError(f"lr_scheduler= needs an optimizer. Pass optimizer=, {EXAMPLES['optimizer']}.")
    if recipe.optimizer is not None and not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"optimizer= has nothing to train: {type(model).__name__} has no parameter with requires_grad=True. "
            "Unfreeze those that are to be trained, or leave optimizer= out."
        )
    check_nothing_trainable(recipe.loss_fn, model)


def check_nothing_trainable(loss_fn: Any, model: nn.Module) -> None:
    """Check that a loss function reads no tensors that require grad, its own or the model's.

    Raises:
        UsageError: it does.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trainable = {place: t for place, t in closure_tensors(loss_fn).items() if t.requires_grad}
    if trainable:
        listed = ", ".join(
            f"`{place}` {list(t.shape)}" + (f", the model's {names[id(t)]}" if id(t) in names else "")
            for place, t in list(trainable.items())[:MAX_NAMED]
        )
        more = ", …" if len(trainable) > MAX_NAMED else ""
        raise UsageError(
            f"loss_fn reads {plural(len(trainable), 'tensor')} with requires_grad: {listed}{more}. "
            "Ranks have copies of them that no update changes. What is to be trained, or penalised, has to be in the "
            "model: return it from a module around the model, next to the output. Freeze the rest with "
            "requires_grad_(False)."
        )


def check_loss_fits(loss_fn: Any, graph: Graph) -> None:
    """Check that cross-entropy, the default loss, is given one tensor.

    Args:
        graph: the model's training graph.

    Raises:
        UsageError: the model returns something else.
    """
    if loss_fn is F.cross_entropy and graph.out_spec != flatten(None)[1]:
        paths = [f"output{path_text(graph.out_spec, number)}" for number in range(len(graph.outputs))]
        example = paths[0] if paths else "output"
        raise UsageError(
            f"loss_fn is cross_entropy, the default, which takes one tensor; in training {graph.model} returns "
            f"{first_few(paths, MAX_NAMED) or 'none'}. Pass a loss_fn for them, such as lambda output, target: "
            f"F.cross_entropy({example}, target)."
        )


def try_recipe(recipe: TrainingRecipe, graph: Graph) -> None:
    """Build the optimizer and its scheduler over small parameters, as each rank will over its own.

    Raises:
        UsageError: one of them cannot be built, or does not use the argument of its callable; or the default loss does
            not fit the model.
    """
    if recipe.optimizer is None:
        return
    if recipe.loss_over != "caller":
        check_loss_fits(recipe.loss_fn, graph)
    with probe_context(torch.device("cpu")):
        small = {w.name: nn.Parameter(small_weight(w)) for w in graph.weights if w.requires_grad}
        optimizer = made(recipe.optimizer, small)
        if recipe.lr_scheduler is not None:
            scheduler_of(recipe.lr_scheduler, optimizer)
