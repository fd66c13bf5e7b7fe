"""Parameter groups of an optimizer: the names in each, and its options as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RANK_LOCAL_KEYS = frozenset({"params", "param_names"})  # of a parameter group; all other keys are options

NamedState = Mapping[str, Mapping[Any, Any]]  # state of an optimizer by parameter name, then by key


@dataclass(frozen=True)
class ParamGroup:
    """Parameters by original name, and their common options (``weight_decay``, ``lr_scale``, …)."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


def grouped(named: Mapping[str, torch.Tensor], groups: Iterable[ParamGroup]) -> list[dict[str, Any]]:
    """Argument of an optimizer: each group with its parameters that are among ``named``."""
    return [{"params": [named[n] for n in own.names if n in named], **own.options} for own in groups]


def names_in_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of the parameters in each group."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def options_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Options of each parameter's group, by the parameter's name."""
    groups = zip(optimizer.param_groups, names_in_groups(optimizer, parameters), strict=True)
    return {name: options_of(group) for group, names in groups for name in names}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group, as plain data."""
    return plain_data({name: value for name, value in group.items() if name not in RANK_LOCAL_KEYS})


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of an option or of a parameter's state are equal, tensors by their elements."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    return bool(one == other)


def plain_data(value: Any) -> Any:
    """``value`` as plain data: numpy's numbers become Python's, and tensors become copies on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, list, tuple):
        return type(value)(
            {key: plain_data(item) for key, item in value.items()} if type(value) is dict else map(plain_data, value)
        )
    return value
