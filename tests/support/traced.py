"""A model whose forward is one function of the test, and the traced graph as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph


class Body(nn.Module):
    """A linear layer, submodules by name, and a forward that is a function of the model and its inputs."""

    norm: nn.Module
    idle: nn.Module
    drop: nn.Module

    def __init__(self, function: Callable, **modules: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Any, *rest: Any) -> Any:
        return self.function(self, x, *rest)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def ops(graph: Graph) -> list[str]:
    """Lines of the printed graph, one for each operation."""
    return [line.strip() for line in str(graph).splitlines()[1:]]


def calls(graph: Graph) -> list[str]:
    """Lines of the printed graph without types, as ``add = aten.add.Tensor(%x, 1)``."""
    return [line.split(":")[0] + " =" + line.split("=", 1)[1] for line in ops(graph)]
