"""State dicts: whether a user's fits the model that it is to be loaded into, and versions of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.graph import Weight
from autopar.ir.units import of_type


def misfit(
    state: Any, weights: Mapping[str, Weight], required: Sequence[str], optional: Collection[str], model: str
) -> str:
    """How a state dict does not fit a model, as a message; empty if it fits.

    Args:
        weights: by each of their names in a state dict.
        required: names that the state dict must have.
        optional: names of other things that it may have.
        model: name of the model.
    """
    if not isinstance(state, Mapping):
        return f"The state dict of {model} is {of_type(state)}, expected a dict of tensors by name."
    missing = [name for name in required if name not in state]
    unknown = [name for name in state if name not in weights and name not in optional]
    if missing or unknown:
        return (
            f"The state dict does not fit {model}: {len(missing)} names missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. It must be one of the unmodified model."
        )
    for name in required:
        tensor, shape = state[name], list(weights[name].shape)
        if not isinstance(tensor, torch.Tensor):
            return f"{name} in the state dict is {of_type(tensor)}, expected a tensor of shape {shape}."
        if tensor.layout != torch.strided or tensor.is_quantized:
            return (
                f"{name} in the state dict is of layout {tensor.layout}, dtype {tensor.dtype}; expected a dense tensor."
            )
        if list(tensor.shape) != shape:
            return f"{name} in the state dict has shape {list(tensor.shape)}, the model's is {shape}."
        if tensor.is_meta:
            return f"{name} in the state dict is on the meta device and holds no numbers."
    return ""


def with_versions(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the versions of modules that another one has; torchvision's MNASNet loads none without.

    They are its attribute ``_metadata``, which is not public in torch 2.11 to 2.15; a file of safetensors has none.
    """
    versioned = OrderedDict(state)
    versioned._metadata = getattr(like, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return versioned
