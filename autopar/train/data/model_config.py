"""Images as a model was trained on them: timm's data config, and the presets of torchvision's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from autopar.api.model_source import ModelSource, default_input_shape, torchvision_preset
from autopar.errors import UsageError
from autopar.train.timm_optional import needed

USUAL_SIDE = 224


@dataclass(frozen=True)
class ModelConfig:
    """Images that a model expects; fields as in `autopar.train.data.wanted.Wanted`."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str


def model_config(source: ModelSource, side: int | None = None) -> ModelConfig:
    """Images that a model of timm or torchvision expects; of another one 224 pixels with ImageNet's statistics.

    Args:
        side: of the images, instead of the model's.

    Raises:
        UsageError: the model's images are not square.
    """
    model = source.build("meta")
    resolved = needed("timm.data", "Reading images").resolve_data_config({}, model=model)
    side = side or expected_side(source, model)
    mean, std = tuple(resolved["mean"]), tuple(resolved["std"])
    preset = torchvision_preset(source.name)
    if preset is None:
        return ModelConfig(side, mean, std, resolved["interpolation"], resolved["crop_pct"], resolved["crop_mode"])
    crop_pct = exact_share(preset.crop_size[0], preset.resize_size[0])
    return ModelConfig(side, tuple(preset.mean), tuple(preset.std), preset.interpolation.value, crop_pct, "center")


def expected_side(source: ModelSource, model: nn.Module) -> int:
    """Side of the images for which `autopar.plan` plans a model.

    Raises:
        UsageError: they are not square.
    """
    try:
        height, width = (source.expected_shape(model, 1) or default_input_shape(model, 1))[-2:]
    except UsageError:  # a model of another library, which the plan takes the images' size for
        return USUAL_SIDE
    if height != width:
        raise UsageError(f"{source.name} takes images of {height}×{width}; here they are square. Give --img-size.")
    return height


def exact_share(crop: int, resized: int) -> float:
    """The crop's share of the resized side, from which timm computes that side again and rounds down."""
    share = crop / resized
    return share if math.floor(crop / share) == resized else math.nextafter(share, 0)
