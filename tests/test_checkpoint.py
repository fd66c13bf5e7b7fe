"""Checkpoints go from any mesh to any other to the last bit, and into the unmodified model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import torch
from checkpoint_models import (
    ADAMW,
    CLASSES,
    IMAGES,
    LABELS,
    ROWS,
    VIT,
    assert_equal,
    contents,
    save_small,
    small,
    start,
    trained,
)
from safetensors import safe_open
from test_mesh_parity import slow_compute
from test_torchrun import torchrun
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typer.testing import CliRunner
from zoo import Tied

import autopar
from autopar import ResumeWarning
from autopar.checkpoints import read_header, read_plan, read_weights
from autopar.cli import app
from autopar.ir import Plan
from autopar.runtime.planners import read_metadata


@dataclass(frozen=True)
class Leg:
    """What a run under one mesh did with a checkpoint: saved it again, and trained on from it twice."""

    folder: Path
    plan: Plan
    extra: Any
    state: dict[str, torch.Tensor]
    losses: tuple[list[float], list[float]]
    rates: list[float]
    final: dict[str, torch.Tensor]
    outputs: torch.Tensor


def leg(name: str, devices: int, mesh: dict[str, Any], given: Path | None, folder: Path) -> Leg:
    """Go on from a given checkpoint, or from nothing."""
    with start(name, devices, seed=0 if given is None else 5, **mesh) as pm:
        trained(pm, 3 if given is None else 1)  # so that there is always something to replace
        extra = {"epoch": 3, "best": [0.5, None]} if given is None else pm.load_checkpoint(given)
        pm.save_checkpoint(folder, extra)
        state = pm.state_dict()
        pm.eval()
        outputs = pm(IMAGES)
        pm.train()
        losses, rates, final = trained(pm), pm.learning_rates(), pm.state_dict()
        pm.load_checkpoint(folder)
        return Leg(folder, pm.plan, extra, state, (losses, trained(pm)), rates, final, outputs)


MESHES: dict[str, dict[str, dict[str, Any]]] = {
    "vit": {"tp": {"tp": 2, "hardware": "slow-compute"}, "pp": {"pp": 2}, "zero1": {"dp": 2, "zero1": True}},
    "convolutions": {"zero1": {"dp": 2, "zero1": True}},
}


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Leg]]:
    """One device, then each mesh from the checkpoint of the one before, then one device again."""
    found: dict[str, dict[str, Leg]] = {}
    for name, meshes in MESHES.items():
        root = tmp_path_factory.mktemp(name)
        # Batch norm sees microbatches of 2 samples everywhere.
        alone = {"microbatches": 4 if name == "convolutions" else 2}
        own = found[name] = {"first": leg(name, 1, alone, None, root / "first")}
        given = own["first"].folder
        for key, mesh in meshes.items():
            chosen = mesh | ({"hardware": str(slow_compute(root))} if "hardware" in mesh else {})
            own[key] = leg(name, 2, chosen, given, root / key)
            given = own[key].folder
        own["last"] = leg(name, 1, alone, given, root / "last")
    return found


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_goes_on_from_any_other(name: str, legs: dict[str, dict[str, Leg]]) -> None:
    first, *others = legs[name].values()
    saved = contents(first.folder)
    assert {"model.head.weight", "optimizer.head.weight.exp_avg_sq", "head.weight.step"} < saved.keys()
    assert first.rates == [0.00125, 0.00125]
    for other in others:
        assert other.extra == {"epoch": 3, "best": [0.5, None]}
        assert_equal(other.state, first.state)
        assert_equal(contents(other.folder), saved)
        assert (read_header(other.folder).updates, read_plan(other.folder)) == (3, other.plan)
        assert other.rates == first.rates
        assert other.losses[0] == pytest.approx(first.losses[0], rel=2e-5), other.plan.mesh
        assert other.losses[0] == other.losses[1]  # to the last bit
        written = [path.stat().st_size for path in (other.folder / "data-1").glob("*.distcp")]
        assert len(written) == other.plan.mesh.devices and min(written) > 0.3 * max(written)  # ranks share the work
    assert others[-1].losses[0] == first.losses[0]
    assert_equal(others[-1].final, first.final)


def test_a_fused_weight_is_written_in_the_strides_of_its_heads(legs: dict[str, dict[str, Leg]]) -> None:
    run = legs["vit"]["tp"]
    assert run.plan.shardings["blocks.*.attn.qkv.weight"] == "tp:0x3"
    saved = read_metadata(run.folder / "data-1").state_dict_metadata["model.blocks.0.attn.qkv.weight"]
    assert isinstance(saved, TensorStorageMetadata)
    assert sorted(chunk.offsets[0] for chunk in saved.chunks) == [0, 16, 32, 48, 64, 80]
    assert {tuple(chunk.sizes) for chunk in saved.chunks} == {(16, 32)}
    assert_equal(read_weights(run.folder), run.state)


TORCHRUN = """
import os, sys, warnings
import torch
sys.path.insert(0, os.environ["TESTS"])
from checkpoint_models import IMAGES, LABELS, start
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
with start("convolutions", 2, dp=2, zero1=True) as pm:
    half = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        pm.train_step(IMAGES[half], LABELS[half])
    os.chdir("/") if rank == 1 else None
    folder = os.environ["TESTS_FOLDER"]
    pm.save_checkpoint(folder, {"rank": rank})
    loss = pm.train_step(IMAGES[half], LABELS[half]).loss
    assert pm.load_checkpoint(folder) == {"rank": 0}  # the first rank's counts
    assert pm.train_step(IMAGES[half], LABELS[half]).loss == loss
    try:
        pm.load_checkpoint(folder if rank == 0 else "/nowhere")
        raise SystemExit("loaded from nowhere")
    except autopar.CheckpointError as error:
        assert "/nowhere is not a checkpoint: it does not exist" in str(error), error
    assert pm.train_step(IMAGES[half], LABELS[half]).loss < loss  # goes on
print(f"rank {rank} agrees {loss!r}", flush=True)
"""


def test_under_torchrun_the_ranks_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    monkeypatch.setenv("TESTS_FOLDER", str(folder))
    done = torchrun(tmp_path, "", TORCHRUN)
    assert done.returncode == 0, done.stderr[-3000:]
    loss = float(done.stdout.split("agrees ")[1].split("rank")[0])
    with start("convolutions", seed=5) as pm:
        assert pm.load_checkpoint(folder) == {"rank": 0}
        assert pm.train_step(IMAGES, LABELS).loss == pytest.approx(loss, rel=0.1)  # other microbatches for batch norm


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_small(tmp_path / "saved")


def test_the_second_save_replaces_the_first(saved: Path) -> None:
    with small() as pm:
        pm.load_checkpoint(saved)
        pm.save_checkpoint(saved, {"step": 2})
        assert pm.load_checkpoint(saved) == {"step": 2}
    assert sorted(path.name for path in saved.iterdir()) == [".saving", "checkpoint.json", "data-2"]


def test_gradients_are_dropped_and_counters_go_on(saved: Path) -> None:
    with small() as pm:
        pm.forward_backward(ROWS, CLASSES)
        pm.load_checkpoint(saved)
        assert pm.gradients() == {}
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(saved)
    assert read_header(saved).updates == 2


def test_without_an_optimizer_the_weights_are_taken(saved: Path) -> None:
    with small(optimizer=None) as pm:
        pm.load_checkpoint(saved)
        assert_equal(pm.state_dict(), read_weights(saved))
        pm.save_checkpoint(saved)
    with small() as pm, pytest.warns(ResumeWarning, match="has no optimizer: the one here starts from scratch"):
        pm.load_checkpoint(saved)


def test_a_checkpoint_taken_before_any_update(tmp_path: Path) -> None:
    with small() as pm:
        pm.save_checkpoint(tmp_path)
        first = pm.train_step(ROWS, CLASSES).loss
        pm.load_checkpoint(tmp_path)
        assert pm.train_step(ROWS, CLASSES).loss == first


class Scaler:
    """Stands for a loss scaler."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class Average:
    """Stands for averages of weights."""

    def __init__(self, pm: Any, factor: float) -> None:
        self.own = {name: tensor * factor for name, tensor in pm.state_dict().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.own


def test_averages_and_loss_scale(saved: Path) -> None:
    with small() as pm:
        rank = pm._ranks.rank
        rank.updater.scaler, rank.ema = Scaler(512.0), Average(pm, 0.5)
        pm.load_checkpoint(saved)  # has neither: averages start at the weights
        assert_equal(rank.ema.own, pm.state_dict())
        rank.ema = Average(pm, 0.5)
        pm.save_checkpoint(saved)
        halved = dict(rank.ema.own)
        rank.updater.scaler, rank.ema = Scaler(1.0), Average(pm, 3.0)
        pm.load_checkpoint(saved)
        assert rank.updater.scaler.scale == 512.0
        assert_equal(rank.ema.own, halved)
        assert_equal(read_weights(saved, ema=True), halved)
        assert_equal(read_weights(saved), pm.state_dict())


@pytest.mark.parametrize("name", ["sgd", "momentum", "lion", "nadamw", "rmsprop", "adafactor", "lookahead_adamw"])
def test_any_optimizer_of_timm(name: str, tmp_path: Path) -> None:
    make = functools.partial(timm.optim.create_optimizer_v2, opt=name, lr=1e-2)
    with small(optimizer=make) as pm:
        for _ in range(3):
            pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(tmp_path)
        expected = [pm.train_step(ROWS, CLASSES).loss for _ in range(4)]
    with small(optimizer=make) as pm:
        pm.load_checkpoint(tmp_path)
        assert [pm.train_step(ROWS, CLASSES).loss for _ in range(4)] == expected


# -- export ---------------------------------------------------------------------------------------------------------


def export(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_timm_loads_what_is_exported(tmp_path: Path, legs: dict[str, dict[str, Leg]]) -> None:
    file, run = tmp_path / "model.safetensors", legs["vit"]["tp"]
    assert export(str(run.folder), "-o", str(file)) == f"{file}: 32 tensors of VisionTransformer after 3 updates\n"
    settings = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 10, **VIT}
    model = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(file), **settings).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), run.outputs)
    with safe_open(str(file), "pt") as opened:
        assert opened.metadata() == {"format": "pt", "model": "VisionTransformer", "updates": "3"}


def test_tied_weights_are_exported_under_all_their_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tokens, words = torch.randint(0, 32, (8, 5)), torch.randint(0, 32, (8,))
    with autopar.parallelize(Tied(), 1, tokens, optimizer=ADAMW) as pm:
        pm.train_step(tokens, words)
        pm.save_checkpoint(tmp_path / "saved")
        expected = pm.state_dict()
    export(str(tmp_path / "saved"), "-o", str(file))
    with safe_open(str(file), "pt") as opened:
        assert_equal({name: opened.get_tensor(name) for name in opened.keys()}, expected)  # noqa: SIM118
    assert torch.equal(expected["head.weight"], expected["embed.weight"])


def test_export_of_nothing(tmp_path: Path, saved: Path) -> None:
    for arguments, message in [
        ([str(tmp_path), "-o", str(tmp_path / "x")], "is not a checkpoint"),
        ([str(saved), "-o", str(tmp_path / "x"), "--ema"], "has no averages of weights"),
        ([str(saved), "-o", str(tmp_path / "no" / "x")], "Cannot write"),
    ]:
        done = CliRunner().invoke(app, ["export", *arguments])
        assert (done.exit_code, message in done.output) == (2, True), done.output
