"""The images that a model expects, for training and for its plan."""

from __future__ import annotations

import math

import pytest
import timm.data
from support.effort import only

import autopar
from autopar.api.model_source import ModelSource
from autopar.errors import UsageError
from autopar.train import ModelConfig, model_config

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "efficientnet_b1", "eva02_tiny_patch14_336", "test_vit"])
def test_models_of_timm_have_timms_config(name: str) -> None:
    found = model_config(ModelSource(name))
    expected = timm.data.resolve_data_config({}, model=timm.create_model(name))
    assert expected.pop("input_size")[1:] == (found.side, found.side)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "side", "resized", "interpolation"),
    [("resnet50", 224, 232, "bilinear"), ("efficientnet_b1", 240, 255, "bilinear"), ("vit_b_16", 224, 256, "bilinear"),
     ("efficientnet_b4", 380, 384, "bicubic")],
)  # fmt: skip
def test_models_of_torchvision_have_their_weights_presets(name, side, resized, interpolation) -> None:
    found = model_config(ModelSource(f"torchvision:{name}"))
    assert found == ModelConfig(side, *IMAGENET, interpolation, found.crop_pct, "center")
    assert found.crop_pct == pytest.approx(side / resized) and math.floor(side / found.crop_pct) == resized


@pytest.mark.parametrize(
    ("name", "side"), only([("test_vit", 160)], [("test_vit", 160), ("torchvision:efficientnet_b1", 240)])
)
def test_a_plan_is_for_the_images_that_are_trained_on(name: str, side: int) -> None:
    plan = autopar.plan(ModelSource(name), 1, batch_size=2, hardware="cpu-generic", cost="analytic")
    assert f"float32[2, 3, {side}, {side}]" in str(plan)
    assert model_config(ModelSource(name)).side == side


def test_sizes_that_are_given_win_and_must_be_square() -> None:
    sapiens = ModelSource("vit_base_patch16_sapiens2")
    assert model_config(sapiens, 512).side == 512
    with pytest.raises(UsageError, match=r"sapiens2 takes images of 1024×768; here they are square\. Give --"):
        model_config(sapiens)


def test_other_models_get_imagenets_images(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Conv2d(3, 8, 3)\n")
    monkeypatch.chdir(tmp_path)
    assert model_config(ModelSource("mine:net")) == ModelConfig(224, *IMAGENET, "bicubic", 0.875, "center")
