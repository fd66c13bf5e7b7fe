"""Plans, configs and checkpoints from elsewhere: reading them runs no code of theirs and writes nowhere they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import USER_MODELS, invoke
from support.train_cli import TINY
from support.training import parallel, trainer

from autopar import ModelSource
from autopar.api.checkpoint import read_plan
from autopar.ir.checkpoint_header import sealed

VIT = [*TINY, "num_classes=10", "img_size=32"]
MARK = "was_here"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Text of a plan file of a small ViT."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    code, _, error = invoke(
        "plan", *VIT, "--devices", "1", "--batch", "8", "--hardware", "cpu-generic", "-o", str(path)
    )
    assert code == 0, error
    return path.read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with a module that leaves a file when it is imported."""
    (tmp_path / "evil.py").write_text(f"open({MARK!r}, 'w'); from own_models import linear")
    (tmp_path / "own_models.py").write_text(USER_MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan_file(good: str, name: str, kwargs: dict[str, Any]) -> str:
    data = json.loads(good)
    data["model"] |= {"name": name, "kwargs": kwargs}
    Path("plan.json").write_text(json.dumps(data))
    return "plan.json"


LOADING = {"checkpoint_path": MARK, "num_classes": 10}
BUILDS = (["codegen", "plan.json", "--rank", "0"], ["explain", "plan.json", "--why-not", "microbatches=2"])


@pytest.mark.parametrize("command", BUILDS)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("subprocess:check_call", {"args": ["touch", MARK]}),
        ("evil:linear", {}),
        ("hf-hub:timm/vit_tiny", {}),
        ("local-dir:.", {}),
        ("vit_tiny_patch16_224./../evil", {}),
        ("vit_tiny_patch16_224", LOADING),
        ("torchvision:fcn_resnet50", {"weights_backbone": "DEFAULT"}),
    ],
)
def test_a_plan_builds_only_models_of_libraries(good, folder, command, name, kwargs):
    plan_file(good, name, kwargs)
    code, _, error = invoke(*command)
    assert code == 2 and f"name it on the command line: --model {name}" in error, error
    assert not (folder / MARK).exists()


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "plan.json"],
        ["explain", "plan.json"],
        ["explain", "plan.json", "--diff", "plan.json"],
        ["train", *TINY, "--data", "digits", "--plan", "plan.json", "--devices", "1", "--epochs", "0"],
    ],
)
def test_no_other_command_builds_a_plans_model(good, folder, command):
    plan_file(good, "subprocess:check_call", {"args": ["touch", MARK]})
    invoke(*command)
    assert not (folder / MARK).exists()


def test_the_command_line_may_name_the_users_model(folder, monkeypatch):
    flags = ["own_models:linear", "--model-kwargs", "width=6"]
    code, _, error = invoke("plan", *flags, "--input", "8,6", "--devices", "1", "-o", "plan.json")
    assert code == 0, error
    code, _, error = invoke("codegen", "plan.json", "--rank", "0")
    assert code == 2 and "--model own_models:linear --model-kwargs width=6" in error, error
    for command in BUILDS:
        code, _, error = invoke(*command, "--model", *flags)
        assert code == 0, error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('model = "evil:linear"', "would run code that a file chose. If you trust it, give it on the command line"),
        ('[model-kwargs]\ncheckpoint_path = "was_here"', "would load what a file chose"),
        ('output = "was_here"', "must not decide where to write. Give --output on the command line"),
        ("overwrite = true", "Give --overwrite on the command line"),
        ("download = true", "Give --download on the command line"),
    ],
)
def test_a_config_decides_neither_code_nor_where_to_write(folder, line, message):
    (folder / "run.toml").write_text(line)
    model = [] if line.startswith("model =") else VIT[:1]
    code, _, error = invoke("train", *model, "--data", "digits", "--devices", "1", "--config", "run.toml")
    assert code == 2 and message in error, error
    assert not (folder / MARK).exists()


def test_a_config_may_name_a_model_of_timm(folder):
    (folder / "run.toml").write_text('model = "vit_tiny_patch16_224"\nepochs = 3.5\n[model-kwargs]\ndepth = 2')
    code, _, error = invoke("train", "--data", "digits", "--config", "run.toml")
    assert code == 2 and "key epochs of --config" in error, error


def test_a_checkpoints_plan_is_not_built(folder):
    with parallel() as pm:
        trainer(pm).save("last")
    header = Path("last", "checkpoint.json")
    data = json.loads(header.read_text())
    data["model"] = data["plan"]["model"]["name"] = "subprocess:check_call"
    data["plan"]["model"]["kwargs"] = {"args": ["touch", MARK]}
    del data["sha256"]
    header.write_text(sealed(json.dumps(data, indent=1)))
    code, _, error = invoke("export", "last", "-o", "model.safetensors")
    assert code == 0, error
    code, _, error = invoke("train", *TINY, "--data", "digits", "--devices", "1", "--resume", "last", "-o", "new")
    assert code == 2 and "cannot be resumed so" in error, error
    with parallel(plan=read_plan("last")) as pm:
        trainer(pm).resume("last")
    assert not (folder / MARK).exists()


def test_torchvision_downloads_nothing(monkeypatch):
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", None)
    assert ModelSource("torchvision:fcn_resnet50", {"num_classes": 5}).build("meta").backbone
