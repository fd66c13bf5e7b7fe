"""The model that the flags describe."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from autopar.api.model_source import ModelSource
from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.tools.cli.flags import ModelFlags, parse_kwargs

SIZE_ARGUMENTS = ("img_size", "image_size")  # timm's and torchvision's


def model_source(name: str, flags: ModelFlags, batch: int) -> ModelSource:
    """Source of the named model, for the requested image size and memory format.

    Args:
        batch: first size of the input shape, which is set only if flags or the model's arguments give its size.
    Raises:
        UsageError: unknown model, or flags that contradict each other.
    """
    source = ModelSource(name, parse_kwargs(flags.model_kwargs), channels_last=bool(flags.channels_last))
    if flags.inputs and flags.img_size is not None:
        raise UsageError("Both --input and --img-size are given. Leave one out.")
    side = flags.img_size or size_argument(source)
    if flags.inputs or not isinstance(side, int):
        return source
    return replace(sized(source, side), input_shape=(batch, source.kwargs.get("in_chans", 3), side, side))


def size_argument(source: ModelSource) -> Any:
    """Size of the images by the model's arguments: a number, or several of images that are not square; None without."""
    return next((source.kwargs[name] for name in SIZE_ARGUMENTS if name in source.kwargs), None)


def with_classes(source: ModelSource, num_classes: int) -> ModelSource:
    """Model with as many classes as the data, unless its arguments set the number.

    Raises:
        UsageError: the arguments set fewer classes than the data has.
    """
    given = source.kwargs.get("num_classes")
    if given is not None and given < num_classes:
        raise UsageError(f"--model-kwargs num_classes={given}: the data has {num_classes} classes. Leave it out.")
    if given is not None or not accepts(source, "num_classes"):
        return source
    return replace(source, kwargs={**source.kwargs, "num_classes": num_classes})


def sized(source: ModelSource, side: int) -> ModelSource:
    """Source of the model for square images of ``side`` pixels; unchanged if the model has no argument for the size.

    Raises:
        UsageError: the model's arguments have another size.
    """
    for name in SIZE_ARGUMENTS:
        given = source.kwargs.get(name)
        if given is not None and given not in (side, (side, side), [side, side]):
            raise UsageError(f"--img-size {side} and --model-kwargs {name}={given} disagree. Leave one out.")
        if given is not None:
            return source
    known = [name for name in SIZE_ARGUMENTS if accepts(source, name)]
    return replace(source, kwargs={**source.kwargs, known[0]: side}) if known else source


def accepts(source: ModelSource, argument: str) -> bool:
    """Whether the model's class takes an argument; of a user's model, whether its factory does."""
    library, colon, _ = source.name.partition(":")
    if colon and library != "torchvision":
        return argument in inspect.signature(source.factory()).parameters
    for kind in type(source.build("meta")).__mro__:  # some classes pass arguments on as **kwargs
        if "__init__" in vars(kind):
            parameters = inspect.signature(kind.__init__).parameters
            if argument in parameters or not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
                return argument in parameters
    return False


def named_plan(plan: Plan, source: ModelSource) -> Plan:
    """The plan with the name and the arguments from which its model can be built again."""
    return replace(plan, model=replace(plan.model, name=source.name, kwargs=dict(source.kwargs)))
