"""The layout of values between regions: a transposed one is copied once, and others follow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ops.regions import region_starts
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model
from autopar.trace.passes.layouts import is_transposed


class Blocks(nn.Module):
    """Blocks on tokens that a convolution made; ``kind`` says what becomes of its result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stem = kind, nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Conv2d(16, 16, 1) if kind.startswith("images") else nn.Linear(16, 16), nn.GELU()] * 4)
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.kind == "tokens":
            x = x.flatten(2).transpose(1, 2)
        elif self.kind == "strided":
            x = x.flatten(2).as_strided((len(x), 16, 16), (256, 1, 16))
        elif self.kind == "images last":
            x = x.contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = x + block(x)
        return x.sum(1) if self.kind == "tokens" else x


def lowered(model: nn.Module) -> Graph:
    return lower_model(model, as_call(model, torch.randn(2, 3, 16, 16)), "train", "")


def handed_on(graph: Graph) -> list[str]:
    """Values that a later region reads."""
    starts, made, found = region_starts(graph.ops), dict[str, int](), list[str]()
    for position, op in enumerate(graph.ops):
        number = sum(start <= position for start in starts)
        found += [name for name in op.reads if made.get(name, number) < number]
        made |= {value.name: number for value in op.outputs}
    return found


def test_tokens_of_a_convolution_are_copied_once() -> None:
    graph = lowered(Blocks("tokens"))
    copies = [op.name for op in graph.ops if op.target == "aten.contiguous.default"]
    assert copies == ["transpose.contiguous"]
    names = handed_on(graph)
    assert len(names) >= 3 and all(graph.values[name].stride == (256, 16, 1) for name in names)


@pytest.mark.parametrize("kind", ["images", "images last", "strided"])
def test_other_layouts_stay(kind: str) -> None:
    graph = lowered(Blocks(kind))
    assert not any(op.name.endswith(".contiguous") and op.module for op in graph.ops)
    assert any(is_transposed(value) for value in graph.values.values()) == (kind == "strided")
