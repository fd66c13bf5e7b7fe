"""Models by name, and the shape of the inputs that they expect."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from autopar.api.model_names import MODEL_NAMES, missing_library, unknown_model
from autopar.errors import UsageError, suggest
from autopar.ir.pytree import tree_map
from autopar.ir.units import of_type
from autopar.trace.frames import frame_text, user_frame

LIBRARY_NAME = re.compile(r"(torchvision:)?[\w.-]+")
READING = ("cache", "checkpoint", "pretrained", "weights")  # first words of arguments that load files or download


@dataclass(frozen=True)
class ModelSource:
    """A model by name: ``vit_tiny_patch16_224`` (timm), ``torchvision:resnet50`` or ``package.module:factory``.

    ``input_shape`` includes the batch; None takes it from the model's config. ``channels_last`` is the memory format of
    the model and of its images, which are all inputs of four dims.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None
    channels_last: bool = False

    def build(self, device: str = "cpu") -> nn.Module:
        """The model with fresh weights; on ``meta`` nothing is allocated.

        Raises:
            UsageError: there is no such model (names near matches), or its factory refuses the arguments.
        """
        factory = self.factory()
        try:
            model = built_on_meta(factory, self.kwargs) if device == "meta" else built_on(device, factory, self.kwargs)
        except Exception as error:
            arguments = ", ".join(f"{k}={v!r}" for k, v in self.kwargs.items())
            failed = " ".join([placed(error), *getattr(error, "__notes__", ())])
            raise UsageError(f"{self.name}({arguments}) failed: {failed}") from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.name} returned {of_type(model)}; it must return a torch.nn.Module.")
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def factory(self) -> Any:
        """The callable that builds the model."""
        library, colon, name = self.name.partition(":")
        if library == "timm" or not colon:
            timm = need("timm", f"Model {self.name!r}")
            if not timm.is_model(self.name):  # nor is timm:resnet50
                raise unknown_model(self.name, timm.list_models(), "timm")
            return lambda **kwargs: timm.create_model(self.name, pretrained=False, **kwargs)
        if library == "torchvision":
            models = need("torchvision.models", f"Model {self.name!r}")
            if name not in models.list_models():
                raise unknown_model(name, models.list_models(), "torchvision")
            arguments = inspect.signature(models.get_model_builder(name)).parameters
            backbone = {n: None for n in ("weights_backbone",) if n in arguments}  # by default it downloads weights
            return lambda **kwargs: models.get_model(name, weights=None, **backbone | kwargs)
        return user_factory(self.name, library, name)

    def expected_shape(self, model: nn.Module, batch: int) -> tuple[int, ...] | None:
        """``input_shape``, else a batch of images as torchvision evaluates its classifier; None for other models.

        Args:
            model: what `build` returned.
        """
        preset = torchvision_preset(self.name)
        if self.input_shape is not None or preset is None or isinstance(getattr(model, "image_size", None), int):
            return self.input_shape
        return (batch, 3, preset.crop_size[0], preset.crop_size[0])


@dataclass(frozen=True)
class BuiltModel:
    """A module, and how a plan file names and builds it.

    Args:
        source: where the module was built by name; None for a module of the user's.
    """

    module: nn.Module
    name: str
    kwargs: Mapping[str, Any]
    source: ModelSource | None = None


def built_model(model: nn.Module | str | ModelSource, device: str = "cpu") -> BuiltModel:
    """The user's module, or one that is built by name on a device."""
    source = ModelSource(model) if isinstance(model, str) else model
    if isinstance(source, ModelSource):
        return BuiltModel(source.build(device), source.name, source.kwargs, source)
    return BuiltModel(source, type(source).__name__, {})


def torchvision_preset(name: str) -> Any:
    """Evaluation transform of the default weights of a torchvision classifier; None for other models.

    Its fields are ``crop_size``, ``resize_size``, ``mean``, ``std`` and ``interpolation``.
    """
    library, _, model = name.partition(":")
    if library != "torchvision":
        return None
    preset = need("torchvision.models", f"Model {name!r}").get_model_weights(model).DEFAULT.transforms()
    return preset if type(preset).__name__ == "ImageClassification" else None  # not of videos or boxes


def in_channels_last(values: Any) -> Any:
    """Values with their tensors of four dims in channels_last memory format."""

    def in_format(leaf: Any) -> Any:
        is_image = isinstance(leaf, torch.Tensor) and leaf.ndim == 4
        return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf

    return tree_map(in_format, values)


def built_on(device: str, factory: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a factory with new tensors on a device."""
    with torch.device(device):
        return factory(**kwargs)


def built_on_meta(factory: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a factory with tensors on the meta device. If that fails, call it again with only parameters on meta: it
    may read values, such as drop rates from a ``linspace``.

    Raises:
        Exception: the first call's, with a note on the second call's if that differs. Either may be the user's mistake:
            the first call may only have read a value, the second may only find a name taken by the first.
    """
    try:
        return built_on("meta", factory, kwargs)
    except Exception as first:
        known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

        def without_values(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:  # torch says None
            if parameter.is_meta:
                return parameter
            twin = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            return known.setdefault(id(parameter), (parameter, twin))[1]  # one that modules share stays one

        try:
            with register_module_parameter_registration_hook(without_values):
                model = built_on("cpu", factory, kwargs)
        except Exception as second:
            if error_text(second) != error_text(first):
                first.add_note(f"A second call, with all but the parameters on the CPU, failed: {placed(second)}")
        else:
            return model.to("meta") if isinstance(model, nn.Module) else model
        raise


def error_text(error: BaseException) -> str:
    """``ValueError: no such depth``"""
    return f"{type(error).__name__}: {str(error).removesuffix('.')}"


def placed(error: BaseException) -> str:
    """An error with the innermost line of the model's code: ``ValueError: no such depth at net.py:7, in Net: `…`.``"""
    return f"{error_text(error)}{frame_text(user_frame(error))}."


def check_named_by_file(name: str, kwargs: Mapping[str, Any], instead: str) -> None:
    """Check that a model which a file names can be built without running foreign code, reading files or downloading.

    Args:
        instead: how to name the model outside of the file, for messages.

    Raises:
        UsageError: it is neither a timm nor a torchvision name, or an argument loads weights.
    """
    if not LIBRARY_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is neither a timm name nor torchvision:NAME. Building it would run code that a file chose. If "
            f"you trust it, {instead}."
        )
    for argument in kwargs:
        if argument.startswith(READING):
            raise UsageError(
                f"Argument {argument}={kwargs[argument]!r} of {name} would load what a file chose. If you want that, "
                f"{instead}."
            )


def user_factory(full_name: str, module_name: str, name: str) -> Any:
    """The factory of ``package.module:factory``; modules are also looked up in the current directory.

    Raises:
        UsageError: the module cannot be imported, or has no such function.
    """
    if not module_name:
        raise UsageError(f"Model {full_name!r} names no module. {MODEL_NAMES}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"Cannot import {module_name!r} of model {full_name!r}: {error}.{suggest(module_name, ['torchvision'])} "
            f"{MODEL_NAMES}"
        ) from error
    except Exception as error:  # the module's own
        raise UsageError(f"Cannot import {module_name!r} of model {full_name!r}: {placed(error)}") from error
    public = {n: f for n, f in vars(module).items() if callable(f) and not n.startswith("_")}
    if name not in public:
        raise unknown_model(name, list(public), module_name)
    return public[name]


def need(module_name: str, what: str) -> Any:
    """A module of an optional library.

    Args:
        what: the user's object that needs it, for the message.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        package = module_name.split(".")[0]
        raise missing_library(what, package) from error


def default_input_shape(model: nn.Module, batch: int) -> tuple[int, ...]:
    """Shape of the image batch that a timm or torchvision model expects: [batch, channels, height, width].

    Raises:
        UsageError: the model is from neither library.
    """
    image_size = getattr(model, "image_size", None)  # torchvision's transformers
    if isinstance(image_size, int):
        return (batch, 3, image_size, image_size)
    config = getattr(model, "pretrained_cfg", None)  # timm
    if isinstance(config, Mapping) and "input_size" in config:
        channels, height, width = config["input_size"]
        channels = getattr(model, "in_chans", channels)
        grid = getattr(getattr(model, "patch_embed", None), "img_size", None)
        height, width = grid if isinstance(grid, tuple) else (height, width)
        return (batch, channels, height, width)
    module = type(model).__module__
    if module.startswith("torchvision.") and not module.startswith("torchvision.models.video"):
        side = 299 if type(model).__name__ == "Inception3" else 224
        return (batch, 3, side, side)
    raise UsageError(
        f"Cannot derive the inputs of {type(model).__name__}: it is no image model of timm or torchvision. "
        "Pass example_inputs (a tuple or dict of tensors at the global batch), or --input 8,3,64,64."
    )
