"""Models by name, built without memory for their weights."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from autopar import UsageError
from autopar.api.model_source import ModelSource


class Tied(nn.Module):
    """Reads values in its constructor, and has weights and a parameter that two modules share."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rates = [r.item() for r in torch.linspace(0, rate, 3)]
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        shared = nn.Parameter(torch.ones(4), requires_grad=False)
        self.a, self.b = nn.ParameterList([shared]), nn.ParameterList([shared])
        self.register_buffer("scale", torch.ones(4))


def refusing() -> nn.Module:
    raise ValueError("no such depth")


def test_a_factory_that_reads_values_gets_parameters_without_memory() -> None:
    model = ModelSource(f"{__name__}:Tied", {"rate": 1.0}).build("meta")
    assert isinstance(model, Tied)
    assert model.rates == [0.0, 0.5, 1.0]
    assert all(tensor.is_meta for tensor in model.state_dict(keep_vars=True).values())
    assert model.second.weight is model.first.weight
    assert model.a[0] is model.b[0]
    assert not model.a[0].requires_grad
    assert {tensor.device.type for tensor in ModelSource(f"{__name__}:Tied").build().parameters()} == {"cpu"}
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # no trace of it in modules built later


def test_regnets_of_torchvision_are_built_by_name() -> None:
    model = ModelSource("torchvision:regnet_y_400mf").build("meta")
    assert sum(p.numel() for p in model.parameters()) == 4_344_144
    assert all(p.is_meta for p in model.parameters())


def test_the_error_of_a_factory_is_its_own() -> None:
    assert __name__ in sys.modules
    with pytest.raises(UsageError, match=r"refusing\(\) failed: ValueError: no such depth"):
        ModelSource(f"{__name__}:refusing").build("meta")
