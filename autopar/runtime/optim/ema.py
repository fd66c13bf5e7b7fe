"""Moving average of a rank's weights, computed by an object of the user's such as timm's ModelEmaV3."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.errors import AutoparError, UsageError
from autopar.ir.graph import Graph, Weight
from autopar.runtime.optim.param_groups import plain_data
from autopar.runtime.optim.probe import probe_context, small_weight

MAX_STATE_SIZE = 1024  # elements of a tensor that counts as state of the averaging itself
UNUSED = "unused"  # name of a placeholder on ranks without parameters: ModelEmaV3 reads the first parameter's device


def module_of(weights: Mapping[str, torch.Tensor], about: Mapping[str, Weight]) -> nn.Module:
    """Module whose state dict has these tensors under all of their names; the tensors are not copied.

    timm averages a tied weight once per name. Equality with training on one device requires the same on a rank.
    """
    root = nn.Module()
    for name, tensor in weights.items():
        for alias in about[name].names or (name,):
            *path, leaf = alias.split(".")
            owner = root
            for step in path:
                if step not in dict(owner.named_children()):
                    owner.add_module(step, nn.Module())
                owner = owner.get_submodule(step)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=bool(about[name].names))
    if not any(True for _ in root.parameters()):
        device = next((t.device for t in weights.values()), torch.device("cpu"))
        root.register_parameter(UNUSED, nn.Parameter(torch.zeros((), device=device), requires_grad=False))
    return root


class Average:
    """Moving average of a rank's weights. The average of a part of a weight is that part of the average."""

    def __init__(
        self, make: Callable[[nn.Module], Any], weights: Mapping[str, torch.Tensor], about: Mapping[str, Weight]
    ) -> None:
        """``make`` is the user's callable; it copies the module that it gets.

        Raises:
            UsageError: ``make`` fails, or its result has no ``update(module, step=…)`` or no ``module``.
        """
        self.names = tuple(weights)
        self.source = module_of(weights, about)
        try:
            self.keeper = make(self.source)
            inspect.signature(self.keeper.update).bind(self.source, step=1)
            assert isinstance(self.keeper.module, nn.Module)
        except (AutoparError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UsageError(
                f"ema= cannot average the weights: {type(error).__name__}: {error}. It must be a callable(module) "
                "that returns an object with update(module, step=int) and module, such as "
                "functools.partial(timm.utils.ModelEmaV3, decay=0.999)."
            ) from error
        self.made_state = self.plain_state()

    @property
    def module(self) -> nn.Module:
        """Module that has the averages under the names of the weights."""
        return self.keeper.module

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.nbytes for tensor in tensors)  # each tensor once, even if it is tied

    def update(self, num_updates: int) -> None:
        """Update the averages with the weights after ``num_updates`` optimizer steps."""
        self.keeper.update(self.source, step=num_updates)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Averages by name, of weights that are in a state dict. They share memory with the averages."""
        averages = self.module.state_dict()
        return {name: averages[name].detach() for name in self.names if name in averages}

    def plain_state(self) -> dict[str, Any]:
        """Copies of the user's object's attributes and buffers that are numbers, texts, None or small tensors."""
        modules = (self.source, self.module)
        weights = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        values = dict(getattr(self.keeper, "__dict__", {}))
        if isinstance(self.keeper, nn.Module):
            values |= self.keeper.named_buffers(recurse=False)
        return {
            name: plain_data(value)
            for name, value in values.items()
            if isinstance(value, bool | int | float | str | np.generic | None)
            or (isinstance(value, torch.Tensor) and value.numel() <= MAX_STATE_SIZE and id(value) not in weights)
        }

    def state(self) -> dict[str, Any]:
        """Attributes that have changed since the user's object was made, such as a number of updates."""
        made = self.made_state
        return {k: v for k, v in self.plain_state().items() if k not in made or not equal(v, made[k])}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Set the attributes in a ``state()``; all others get the values that they had when the object was made."""
        changed, made = self.state(), self.made_state
        for name in changed.keys() - made.keys() - state.keys():
            delattr(self.keeper, name)
        for name, value in ({k: made[k] for k in changed if k in made} | dict(state)).items():
            if isinstance(value, torch.Tensor):
                current = getattr(self.keeper, name, None)
                like = current if isinstance(current, torch.Tensor) else next(self.source.parameters())
                value = value.to(like.device, copy=True)
            setattr(self.keeper, name, value)


def equal(one: Any, other: Any) -> bool:
    """Whether two values of `Average.plain_state` are equal in type and value."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def with_averages(graph: Graph, make: Callable[[nn.Module], Any]) -> Graph:
    """Training graph with ``average_bytes`` of its weights, measured by averaging small weights.

    Raises:
        UsageError: as `Average`.
    Error: averages that ``make`` keeps on another device than the weights are counted too.
    """
    weights = {w.name: w for w in graph.weights if w.kind != "constant"}
    small = {name: small_weight(weight) for name, weight in weights.items()}
    with probe_context(torch.device("cpu")):
        averages = Average(make, small, weights).tensors()
    kept = {name: tensor.nbytes / tensor.numel() for name, tensor in averages.items() if tensor.numel()}
    return replace(
        graph, weights=tuple(replace(w, average_bytes=kept.get(w.name, w.average_bytes)) for w in graph.weights)
    )
