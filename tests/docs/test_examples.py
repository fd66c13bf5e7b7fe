"""Each example runs to its end as a user would start it, and shows what it promises."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.train import TimmOptimizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
def test_own_model() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_model.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]
    difference = re.search(r"largest difference between two devices and one: (\S+)", done.stdout)
    assert difference is not None and float(difference[1]) < 1e-5


@pytest.mark.full
def test_compare_meshes() -> None:
    script = str(EXAMPLES / "compare_meshes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        [*command, "test_vit", "--img-size", "160", "--batch", "4", "--steps", "1"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(pp \d × tp \d × dp \d) +\d+ +[\d.]+ ms +[\d.]+ ms +[\d.]+$", done.stdout, re.MULTILINE)
    assert rows == ["pp 1 × tp 1 × dp 2", "pp 2 × tp 1 × dp 1", "pp 1 × tp 2 × dp 1"], done.stdout


SMALL = ("--data", "synthetic", "--limit", "64")
SMALL_VIT = ("--model", "test_vit", "--img-size", "32", *SMALL)


def printed(name: str, *flags: str, torchrun: int = 0, wrote: frozenset[str] = frozenset({"last", "best"})) -> str:
    """Output of an example, as a plain script or under torchrun with this many processes.

    Args:
        wrote: files and checkpoints that it must write.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), *flags]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert wrote <= {path.name for path in Path(folder).glob("runs/*/*")}
    return done.stdout


def column(name: str, text: str) -> list[float]:
    """A figure of each epoch's line."""
    return [float(figure) for figure in re.findall(rf"^epoch .* {name} +([\d.e+-]+)", text, re.MULTILINE)]


@pytest.mark.full
def test_vit_pipeline() -> None:
    text = printed("vit_pipeline.py", *SMALL_VIT, "--epochs", "1")
    assert "batch       16 in 4 microbatches of 4" in text and "mesh        pp 2 × tp 1 × dp 1" in text
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True], text


@pytest.mark.full
def test_an_example_does_not_replace_its_earlier_run(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "vit_pipeline.py"), *SMALL_VIT, "--devices", "1", "--epochs", "1"]
    first, second, third = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
        for more in ((), (), ("--overwrite",))
    )
    assert first.returncode == third.returncode == 0, first.stderr + third.stderr
    assert "error: runs/vit-pipeline holds a run already: checkpoint last after 4 updates, " in second.stderr


@pytest.mark.full
def test_hf_vit_hybrid() -> None:
    sizes = ("--hidden-size", "32", "--layers", "2", "--heads", "2", "--img-size", "32")
    text = printed("hf_vit_hybrid.py", *sizes, *SMALL, "--epochs", "2")
    assert "ViTForImageClassification" in text and "mesh        pp 2 × tp 2 × dp 1" in text
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True] * 2, text


@pytest.mark.full
def test_resnet_pipeline() -> None:
    flags = ("--model", "test_resnet", *SMALL, "--epochs", "4", "--warmup-epochs", "2")
    text = printed("resnet_pipeline.py", *flags)
    assert "batch       64 in 4 microbatches of 16" in text and "mesh        pp 2 × tp 1 × dp 1" in text
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True] * 4, text
    rates = column("lr", text)
    assert rates[0] < rates[1] and rates[2] > rates[3], text  # two epochs up, two down


@functools.cache
def losses(parallel: str, devices: int, torchrun: int = 0) -> list[float]:
    """Loss of each epoch of examples/vit_data_to_hybrid.py."""
    flags = ("--batch-size", "16", "--epochs", "2", "--warmup-epochs", "1", "--parallel", parallel)
    wrote = frozenset({"steps.jsonl", "history.jsonl", "last"})
    all_flags = (*SMALL_VIT, *flags, "--devices", str(devices))
    return column("loss", printed("vit_data_to_hybrid.py", *all_flags, torchrun=torchrun, wrote=wrote))


@pytest.mark.full
@pytest.mark.parametrize(("parallel", "devices"), [("data", 2), ("pipeline", 2), ("tensor", 2), ("hybrid", 4)])
def test_vit_data_to_hybrid(parallel: str, devices: int) -> None:
    expected = losses("data", 2, torchrun=2)
    assert len(expected) == 2 and losses(parallel, devices) == pytest.approx(expected, abs=2e-4)


@pytest.mark.full
def test_vit_large_batch() -> None:
    flags = ("--devices", "2", "--batch-size", "32", "--grad-accum-steps", "2", "--epochs", "2", "--warmup-epochs", "1")
    text = printed("vit_large_batch.py", *SMALL_VIT, *flags)
    assert [1.5 < loss < 3.5 for loss in column("loss", text)] == [True] * 2, text
    assert column("lr", text)[1] > 1e-3, text


# -- configured by Hydra ----------------------------------------------------------------------------------------------

FEW = ("data.wanted.num_train=64", "data.wanted.num_test=32", "model.depth=2", "schedule=constant")


def hydra(folder: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> str:
    """Output of examples/hydra_train.py on few images, started in a folder."""
    command = [sys.executable, *launcher, str(EXAMPLES / "hydra_train.py"), *overrides, *FEW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged(job: Path) -> list[float]:
    """Loss of each step of a job."""
    return [json.loads(line)["loss"] for line in (job / "steps.jsonl").read_text().splitlines()]


def test_hydra_composes_the_training_and_closes_each_job(tmp_path: Path) -> None:
    overrides = ("model=vit_tiny", "optimizer.lr=1e-3", "parallel=single,tensor", "epochs=1")
    text = hydra(tmp_path, "-m", *overrides, "hydra.sweep.dir=jobs")
    meshes = re.findall(r"^mesh        (pp \d × tp \d × dp \d)", text, re.MULTILINE)
    assert meshes == ["pp 1 × tp 1 × dp 1", "pp 1 × tp 2 × dp 1"]
    jobs = [tmp_path / "jobs" / str(number) for number in range(2)]
    for job in jobs:
        assert {"last", "best", "history.jsonl", ".hydra", "hydra_train.log"} <= {path.name for path in job.iterdir()}
        assert json.loads((job / "steps.jsonl").read_text().splitlines()[0])["lr"] == 1e-3
        assert "The plan, and results in" in (job / "hydra_train.log").read_text()
    assert logged(jobs[0]) == pytest.approx(logged(jobs[1]), rel=1e-5)


@pytest.mark.full
def test_hydra_goes_on_in_a_run_folder_under_torchrun(tmp_path: Path) -> None:
    same = ("optimizer=lamb", "hydra.run.dir=run")
    hydra(tmp_path, "parallel=pipeline", "+parallel.schedule=1f1b", "epochs=1", *same)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    text = hydra(tmp_path, "parallel=data", "epochs=2", *same, launcher=launcher)
    assert "epoch 2/2" in text and "epoch 1/2" not in text and text.count("mesh        pp 1 × tp 1 × dp 2") == 1
    assert len(logged(tmp_path / "run")) == 4


# -- compared with one device ------------------------------------------------------------------------------------------

# Flags with which an example always runs; in a full run it runs without, on all of its meshes.
COMPARED = [
    ("segmentation.py", ("--mesh", "pp")),
    ("detection.py", ("--mesh", "dp")),
    ("masked_autoencoder.py", ("--mesh", "tp")),
    ("contrastive.py", ("--mesh", "pp")),
    ("distillation.py", ("--mesh", "pp")),
    ("fine_tuning.py", ("--mesh", "pp", "--method", "lora")),
    ("lightning_fabric.py", ("--mesh", "pp")),
    ("accelerate_vit.py", ("--mesh", "pp")),
    ("hf_trainer.py", ("--mesh", "pp")),
    ("lightning_trainer.py", ("--mesh", "dp")),
]
IN_FULL = [pytest.param(name, (), marks=pytest.mark.full) for name, _ in COMPARED]


@pytest.mark.parametrize(("name", "flags"), [*COMPARED, *IN_FULL])
def test_losses_are_those_of_one_device(
    name: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    differences = [float(number) for number in re.findall(r"difference from one device (\S+?)[,\n]", text)]
    trained = [(float(a), float(b)) for a, b in re.findall(r"loss (\d+\.\d+) to (\d+\.\d+)", text)]
    assert len(differences) == len(trained) >= (1 if flags else 3) and max(differences) < 1e-4, text
    assert all(last < first for first, last in trained), text
    assert "equal masks: False" not in text and "others in each step: False" not in text
    for size in re.findall(r"gradients of the teacher: (\d+)", text):
        assert size == "0", text


# -- what they ask for -------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "vit_pipeline.py": {"model": "vit_large_patch16_224", "img_size": 224, "data": "cifar10", "epochs": 60},
    "hf_vit_hybrid.py": {"hidden_size": 768, "layers": 12, "heads": 12, "img_size": 224, "epochs": 3},
    "resnet_pipeline.py": {"model": "resnet50", "data": "cifar10", "epochs": 60},
    "vit_data_to_hybrid.py": {"model": "vit_base_patch16_224", "img_size": 224, "epochs": 300},
    "vit_large_batch.py": {
        "model": "vit_base_patch32_224", "img_size": 224, "epochs": 300, "mixup": 0.2, "batch_size": 32 * 1024,
    },
}  # fmt: skip
TINY_HF = ("--hidden-size", "32", "--layers", "2", "--heads", "2", "--img-size", "32")


def example(name: str) -> ModuleType:
    """An example as a module, which starts nothing."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Asked(Exception):
    """Arguments with which an example calls `autopar.parallelize`."""


def asked(monkeypatch: pytest.MonkeyPatch, name: str, *flags: str) -> dict[str, Any]:
    """The arguments of an example's `autopar.parallelize`, on a small model and little data."""

    def parallelize(model: nn.Module, devices: int, **given: Any) -> None:
        raise Asked({"devices": devices, "batch": len(given.pop("example_inputs")), **given})

    monkeypatch.setattr(autopar, "parallelize", parallelize)
    module = example(name)
    with pytest.raises(Asked) as caught:
        module.main(module.options([*SMALL, *flags]))
    return caught.value.args[0]


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_tutorials(name: str) -> None:
    found = vars(example(name).options([]))
    assert {key: found[key] for key in DEFAULTS[name]} == DEFAULTS[name]


def test_figures_of_vit_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    given = asked(monkeypatch, "vit_pipeline.py", *SMALL_VIT)
    optimizer = given.pop("optimizer")
    assert given == {"devices": 2, "batch": 16, "pp": 2, "microbatches": 4}
    assert (optimizer.func, optimizer.keywords) == (torch.optim.Adam, {"lr": 1e-3})


def test_figures_of_hf_vit_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    given = asked(monkeypatch, "hf_vit_hybrid.py", *TINY_HF, "--limit", "640")
    assert (given["devices"], given["tp"], given["pp"]) == (4, 2, 2)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, rates = given["lr_scheduler"](optimizer), []
    for _ in range(3 * 640 // given["batch"]):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates[:18] == pytest.approx([i / 18 for i in range(18)])  # 0.3 of 60 updates
    assert rates[18:] == pytest.approx([(1 + math.cos(math.pi * i / 42)) / 2 for i in range(42)])


def test_figures_of_resnet_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    given = asked(monkeypatch, "resnet_pipeline.py", "--model", "test_resnet")
    assert (given["devices"], given["pp"], given["batch"], given["microbatches"]) == (2, 2, 64, 4)
    made = given["lr_scheduler"]
    assert (made.name, made.epochs) == ("poly", 60)
    assert made.options == {"warmup_epochs": 5, "decay_rate": 1.0}  # of power 1: linear


def test_figures_of_vit_data_to_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = {
        parallel: tuple(asked(monkeypatch, "vit_data_to_hybrid.py", *SMALL_VIT, "--parallel", parallel).get(axis)
                        for axis in ("dp", "pp", "tp"))
        for parallel in ("data", "pipeline", "tensor", "hybrid", "auto")
    }  # fmt: skip
    assert meshes == {
        "data": (4, 1, 1), "pipeline": (1, 4, 1), "tensor": (1, 1, 4), "hybrid": (1, 2, 2), "auto": (None,) * 3
    }  # fmt: skip
    given = asked(monkeypatch, "vit_data_to_hybrid.py", *SMALL_VIT)
    optimizer, made = given["optimizer"], given["lr_scheduler"]
    assert (optimizer.name, optimizer.lr, weight_decays(optimizer)) == ("adamw", 3e-3, {0.0, 0.3})
    assert (made.name, made.epochs, made.options) == ("cosine", 300, {"warmup_epochs": 32})
    assert given["loss_fn"].keywords == {"label_smoothing": 0.1} and given["recompute"] == "all"


def test_figures_of_vit_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = asked(monkeypatch, "vit_large_batch.py", *SMALL_VIT)
    optimizer, made = given["optimizer"], given["lr_scheduler"]
    assert (optimizer.name, optimizer.lr, weight_decays(optimizer)) == ("lamb", 1.8e-2, {0.0, 0.1})
    assert (made.epochs, made.options) == (300, {"warmup_epochs": 150})
    assert given["clip_grad_norm"] == 1.0
    assert given["batch"] * example("vit_large_batch.py").options([]).grad_accum_steps == 32 * 1024


def weight_decays(optimizer: TimmOptimizer) -> set[float]:
    """Weight decays of all parameter groups; biases and norms have 0."""
    return {group.options["weight_decay"] for group in optimizer.groups}


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("vit_pipeline.py", ["--model", "test_vit", "--data", "digit"], "error: No data set is named 'digit'. Did you"),
        ("vit_pipeline.py", ["--model", "tiny"], "vit_pipeline.py: error: --model tiny: timm has no such model"),
        ("hf_vit_hybrid.py", ["--heads", "5"], "error: --hidden-size 768 is no multiple of --heads 5"),
        ("resnet_pipeline.py", [*SMALL, "--model", "test_resnet", "--epochs", "5"], "error: Schedule 'poly' over 5 ep"),
        ("compare_meshes.py", ["test_vit"], "error: start it with torchrun --nproc-per-node N"),
    ],
)
def test_mistakes_are_one_line(
    name: str, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = str(caught.value.code) if isinstance(caught.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in said and "\n" not in said


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))
