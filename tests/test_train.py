"""Training on real images: the data, the loop, and whole runs of the command."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.errors import TrainingError, UsageError
from autopar.train import Data, Recipe, accuracy, fit, load_data, load_weights, save_weights
from autopar.train.loop import batches, shifted

ROOT = Path(autopar.__file__).parents[1]
TINY = ["vit_tiny_patch16_224", "--model-kwargs", "depth=2", "patch_size=8", "embed_dim=48", "num_heads=3"]


def invoke(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args), prog_name="autopar")
    return result.exit_code, result.stdout, re.sub(r"\s+", " ", result.stderr)


# -- data --------------------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_normalised():
    data = load_data("digits", 32, 3, seed=0)
    assert data.train_images.shape == (1438, 3, 32, 32) and data.test_images.shape == (359, 3, 32, 32)
    assert data.num_classes == 10
    assert data.train_images.mean().item() == pytest.approx(0, abs=1e-4)
    assert data.train_images.std().item() == pytest.approx(1, abs=1e-4)
    shares = data.test_labels.bincount() / (data.test_labels.bincount() + data.train_labels.bincount())
    assert shares.tolist() == pytest.approx([0.2] * 10, abs=0.01)


def test_the_seed_decides_the_split():
    first, again, other = (load_data("digits", 8, 1, seed) for seed in (1, 1, 2))
    assert torch.equal(first.test_labels, again.test_labels) and torch.equal(first.test_images, again.test_images)
    assert not torch.equal(first.test_labels, other.test_labels)


def test_unknown_data_has_near_matches():
    with pytest.raises(UsageError, match=r"No data set is named 'digit'\. Did you mean digits\?"):
        load_data("digit", 32, 3, 0)


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
    real = importlib.import_module

    def without(name: str, package: str | None = None):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError, match=re.escape("pip install 'autopar[train]'")):
        load_data("digits", 32, 3, 0)


# -- loop --------------------------------------------------------------------------------------------------------------


def test_every_epoch_has_its_own_order():
    recipe = Recipe(epochs=2, batch_size=4, lr=1e-3, weight_decay=0.0, seed=0)
    first, again, second = (torch.stack(batches(10, recipe, torch.Generator().manual_seed(n))) for n in (1, 1, 2))
    assert first.shape == (2, 4) and len(first.unique()) == 8
    assert torch.equal(first, again) and not torch.equal(first, second)
    with pytest.raises(UsageError, match="--batch-size 4 is more than the 3 training images"):
        recipe.steps_per_epoch(3)


def test_accuracy_counts_the_ragged_last_batch():
    labels = torch.tensor([0, 1, 2, 3, 4])
    data = Data(torch.empty(0), torch.empty(0), torch.eye(5), labels, 5)
    assert accuracy(lambda images: images.roll(1, 0) if len(images) == 1 else images, data, 2) == 1.0
    assert accuracy(lambda images: torch.ones(len(images), 5).cumsum(1), data, 2) == 0.2


class Silent:
    def step(self, epoch: int, loss: float, lr: float, samples_per_second: float) -> None:
        """Not looked at."""

    def epoch(self, epoch: object) -> None:
        """Not looked at."""


def test_a_loss_that_is_not_finite_stops_the_training():
    data = load_data("digits", 8, 1, 0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    recipe = Recipe(epochs=2, batch_size=256, lr=1e-3, weight_decay=0.0, seed=0)
    poisoned = replace(data, train_images=data.train_images.clone())
    generator = torch.Generator().manual_seed(1)  # of epoch 1 at seed 0
    poisoned.train_images[batches(1438, recipe, generator)[2][0]] = float("inf")
    example = torch.empty(256, 1, 8, 8)
    scheduler = recipe.scheduler(1438)
    with (
        autopar.parallelize(model, 1, example, optimizer=recipe.optimizer, lr_scheduler=scheduler) as pm,
        pytest.raises(TrainingError, match=r"The loss became (nan|inf) in epoch 1, step 3 of 5"),
    ):
        fit(pm, poisoned, recipe, Silent())


def test_images_are_moved_not_changed():
    images = torch.arange(18.0).reshape(2, 1, 3, 3)
    assert torch.equal(shifted(images, 0, torch.Generator()), images)
    moved = shifted(images, 1, torch.Generator().manual_seed(0))
    corners = {float(image[0, 1, 1]) for image in shifted(images[:1].expand(200, 1, 3, 3), 1, torch.Generator())}
    assert moved.shape == images.shape and not torch.equal(moved, images)
    assert corners == {float(v) for v in range(9)}


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_tied_weights_survive_the_file(tmp_path):
    model, fresh = TiedHead(), TiedHead()
    save_weights(model.state_dict(), tmp_path / "w.safetensors")
    load_weights(fresh, tmp_path / "w.safetensors")
    assert torch.equal(fresh.second.weight, model.first.weight) and not fresh.training


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a short run on two processes, started as a user would."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", "from autopar.cli import main; main()", "train", *TINY]
    command += ["--data", "digits", "--devices", "2", "--epochs", "3", "--microbatches", "2", "--lr", "3e-3"]
    command += ["--shift", "1", "--clip-grad", "1", "-o", "out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


def test_train_learns_and_reports(trained):
    folder, printed = trained
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [h["epoch"] for h in history] == [1, 2, 3]
    assert history[2]["loss"] < history[0]["loss"] and history[2]["accuracy"] > 0.2
    assert len(re.findall(r"^epoch [123]/3  loss .* samples/s$", printed, re.M)) == 3
    figures = re.findall(r"(\d+\.\d+) %  (?:on 2 devices|with the weights in the unmodified)", printed)
    assert len(figures) == 2 and figures[0] == figures[1]
    assert float(figures[0]) == pytest.approx(100 * history[2]["accuracy"], abs=0.01)


def test_the_weights_load_into_the_unmodified_model(trained):
    import timm

    folder, _ = trained
    plan = autopar.Plan.load(folder / "plan.json")
    model = timm.create_model(plan.model.name, **plan.model.kwargs)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert accuracy(model.eval(), load_data("digits", 32, 3, 0), 64) == history[-1]["accuracy"]


def test_the_saved_plan_can_be_used_again(trained, tmp_path):
    folder, _ = trained
    code, out, error = invoke(
        "train", *TINY, "--data", "digits", "--plan", str(folder / "plan.json"), "--epochs", "1",
        "--batch-size", "512", "-o", str(tmp_path),
    )  # fmt: skip
    assert code == 0, error
    assert "epoch 1/1" in out
    code, out, _ = invoke("codegen", str(tmp_path / "plan.json"), "--rank", "0")
    assert code == 0 and re.match(r"# rank 0 .*\n# stage 0, train, microbatch of \d+: ", out), out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "cifar", "--devices", "2"], "No data set is named 'cifar'. There is digits"),
        (["--data", "digits"], "On how many devices"),
        (["--data", "digits", "--devices", "2", "--batch-size", "2000"], "--batch-size 2000 is more than the 1438"),
        (
            ["--data", "digits", "--devices", "2", "--batch-size", "4", "--microbatches", "5"],
            "microbatches=5 of a batch",
        ),
        (["--data", "digits", "--devices", "2", "--model-kwargs", "num_classes=5"], "num_classes=5: the data has 10"),
        (["--data", "digits", "--plan", "none.json"], "Cannot read plan file none.json"),
        (["--data", "digits", "--devices", "2", "-o", "/dev/null/x"], "Cannot make the folder /dev/null/x"),
    ],
)
def test_bad_arguments_of_train(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = invoke("train", *TINY, *args)
    assert code == 2
    assert message in error, error


def test_a_plan_and_constraints_exclude_each_other(trained):
    code, _, error = invoke(
        "train", *TINY, "--data", "digits", "--plan", str(trained[0] / "plan.json"), "--memory", "1GiB"
    )
    assert (code, error) == (2, "error: --plan decides already; leave out memory. ")


def test_a_plan_of_another_model_is_refused(trained, tmp_path):
    code, _, error = invoke(
        "train", "vit_tiny_patch16_224", "--model-kwargs", "depth=3", "patch_size=8", "--data", "digits",
        "--plan", str(trained[0] / "plan.json"), "-o", str(tmp_path),
    )  # fmt: skip
    assert code == 2
    assert "The plan is for another model" in error
