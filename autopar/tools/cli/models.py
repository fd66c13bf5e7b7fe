"""The model that the flags describe."""

from __future__ import annotations

import inspect
from dataclasses import replace

from autopar.api.model_source import ModelSource
from autopar.errors import UsageError
from autopar.ir.plan import Plan
from autopar.tools.cli.flags import ModelFlags, parse_kwargs

SIZE_ARGUMENTS = ("img_size", "image_size")  # timm's and torchvision's


def model_source(name: str, flags: ModelFlags, batch: int) -> ModelSource:
    """Source of the named model, for the requested image size and memory format.

    Args:
        batch: first size of the input shape, which is set only with ``--img-size``.
    Raises:
        UsageError: unknown model, or flags that contradict each other.
    """
    source = ModelSource(name, parse_kwargs(flags.model_kwargs), channels_last=flags.channels_last)
    if flags.inputs and flags.img_size is not None:
        raise UsageError("Both --input and --img-size are given. Leave one out.")
    if flags.img_size is None:
        return source
    shape = (batch, source.kwargs.get("in_chans", 3), flags.img_size, flags.img_size)
    return replace(sized(source, flags.img_size), input_shape=shape)


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
    return argument in inspect.signature(type(source.build("meta")).__init__).parameters


def named_plan(plan: Plan, source: ModelSource) -> Plan:
    """The plan with the name and the arguments from which its model can be built again."""
    return replace(plan, model=replace(plan.model, name=source.name, kwargs=dict(source.kwargs)))
