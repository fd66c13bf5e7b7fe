"""Models' names in the sources of timm and torchvision, against the libraries' own lists."""

from __future__ import annotations

import re
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import timm
import torchvision

from autopar.api import model_names
from autopar.api.model_names import check_known, known_names
from autopar.errors import UsageError


def test_the_sources_have_the_names_that_the_libraries_list() -> None:
    assert known_names("timm") == {*timm.list_models()}
    assert known_names("torchvision") == {*torchvision.models.list_models()}


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_tiny_patch16_224.augreg_in21k",  # with a tag of weights
        "vit_tiny_patch16_224_in21k",  # an old name
        "torchvision:resnet50",
        "torchvision:quantized_resnet50",
        "nowhere.at.all:factory",
    ],
)
def test_a_name_that_may_be_built_passes(name: str) -> None:
    check_known(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tyny_patch16_224", "timm has no model named 'vit_tyny_patch16_224' .* Did you mean vit_tiny_patch16_224"),
        ("timm:resnet50", "timm has no model named 'timm:resnet50' .* Did you mean resnet50"),
        ("torchvision:resnet51", "torchvision has no model named 'resnet51' .* Did you mean resnet50"),
        ("vitbase", "timm has no model named 'vitbase' .* Did you mean vit_base_"),
        ("torchvision:ViT-B", "torchvision has no model named 'ViT-B' .* Did you mean vit_b_16 or vit_b_32\\?"),
    ],
)
def test_a_name_that_is_nowhere_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_known(name)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_names, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("needs timm: pip install 'autopar[vision]'")):
        check_known("resnet50")
    assert known_names("torchvision") == set()


def test_without_sources_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("timm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "timm.zip")]
    monkeypatch.setattr(model_names, "find_spec", lambda name: spec)
    check_known("vit_tyny_patch16_224")
