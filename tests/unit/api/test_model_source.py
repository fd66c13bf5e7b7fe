"""Models by name, built without memory for their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar import UsageError
from autopar.api.model_source import ModelSource, default_input_shape


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


CALLS: list[str] = []


def registering() -> nn.Module:
    """Fails on every second call with a misleading error."""
    CALLS.append("registering")
    raise ValueError("depth must be even." if len(CALLS) % 2 else "the name is taken")


def reading() -> nn.Module:
    """Only a call with values says what is wrong."""
    rate = torch.linspace(0, 1, 3)[1].item()
    raise ValueError(f"no such rate: {rate}")


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


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("timm:resnet18", "Did you mean resnet18 "),
        ("torchvison:resnet18", "Did you mean torchvision\\? A model is a timm"),
    ],
)
def test_a_mistyped_library_is_named(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=near):
        ModelSource(name).build("meta")


def test_regnets_of_torchvision_are_built_by_name() -> None:
    model = ModelSource("torchvision:regnet_y_400mf").build("meta")
    assert sum(p.numel() for p in model.parameters()) == 4_344_144
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("factory", "first", "second"),
    [
        ("registering", "ValueError: depth must be even", "ValueError: the name is taken"),
        (
            "reading",
            r"RuntimeError: Tensor\.item\(\) cannot be called on meta tensors",
            r"ValueError: no such rate: 0\.5",
        ),
        ("refusing", "ValueError: no such depth", None),
    ],
)
def test_two_different_errors_of_a_factory_are_both_shown(factory: str, first: str, second: str | None) -> None:
    place = rf" at .*test_model_source\.py:\d+, in {factory}: `.*`\."
    again = rf" A second call, with all but the parameters on the CPU, failed: {second}{place}" if second else ""
    with pytest.raises(UsageError, match=rf"{factory}\(\) failed: {first}{place}{again}$"):
        ModelSource(f"{__name__}:{factory}").build("meta")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make(:", r"SyntaxError: invalid syntax \(broken_model\.py, line 1\)"),
        (
            "import torch\ntorch.Unknown",
            r"AttributeError: .* at .*broken_model\.py:2, in <module>: `torch\.Unknown`\.$",
        ),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=rf"Cannot import 'broken_model' of model 'broken_model:make': {message}"):
        ModelSource("broken_model:make").build("meta")
    with pytest.raises(UsageError, match="Model ':make' names no module"):
        ModelSource(":make").build("meta")


def test_inputs_of_video_models_are_asked_for() -> None:
    model = ModelSource("torchvision:r3d_18").build("meta")
    with pytest.raises(UsageError, match="Cannot derive the inputs of VideoResNet"):
        default_input_shape(model, 8)
