"""A moving average of a rank's weights, kept by an object of the user's such as timm's ModelEmaV3."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, UsageError
from autopar.ir.graph import Graph, Weight

LARGEST = 64  # size of a dim in a trial
UNUSED = "unused"  # where a rank has no parameter, and ModelEmaV3 looks for the device of the first one


def module_of(weights: Mapping[str, torch.Tensor], about: Mapping[str, Weight]) -> nn.Module:
    """A module whose state dict is these tensors under their own names, all names of tied ones; nothing is copied.

    timm averages a tied weight once for each of its names, and equality with one device demands the same here.
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
    """Averages the weights that a rank holds: parts of them, which is the same as parts of the average."""

    def __init__(
        self, make: Callable[[nn.Module], Any], weights: Mapping[str, torch.Tensor], about: Mapping[str, Weight]
    ) -> None:
        """``make`` is the user's; it copies what it is given.

        Raises:
            UsageError: it fails, or gives something without ``update(module, step=…)`` and ``module``.
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

    @property
    def module(self) -> nn.Module:
        """Holds the averages under the names of the weights."""
        return self.keeper.module

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.nbytes for tensor in tensors)  # each once, however often it is tied

    def update(self, num_updates: int) -> None:
        """Take in the weights after so many updates."""
        self.keeper.update(self.source, step=num_updates)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages by name, of all that is in a state dict; they share memory with them."""
        averages = self.module.state_dict()
        return {name: averages[name].detach() for name in self.names if name in averages}


def with_averages(graph: Graph, make: Callable[[nn.Module], Any]) -> Graph:
    """A training graph whose weights say what is kept of them in averages, found by averaging small ones.

    Raises:
        UsageError: as `Average`.
    Error: averages that ``make`` keeps on another device than the weights count too.
    """
    weights = {w.name: w for w in graph.weights if w.kind != "constant"}
    small = {name: small_weight(weight) for name, weight in weights.items()}
    averages = Average(make, small, weights).tensors()
    kept = {name: tensor.nbytes / tensor.numel() for name, tensor in averages.items() if tensor.numel()}
    return replace(
        graph, weights=tuple(replace(w, average_bytes=kept.get(w.name, w.average_bytes)) for w in graph.weights)
    )


def small_weight(weight: Weight) -> torch.Tensor:
    """Zeros in a weight's place."""
    tensor = torch.zeros([min(size, LARGEST) for size in weight.shape], dtype=getattr(torch, weight.stored_dtype))
    return nn.Parameter(tensor, weight.requires_grad) if weight.kind == "parameter" else tensor
