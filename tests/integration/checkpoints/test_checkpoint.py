"""Checkpoints go from any mesh to any other to the last bit, and into the unmodified model."""

from __future__ import annotations

import copy
import functools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest
import timm
import timm.optim
import timm.utils
import torch
import torch.nn.functional as F
from safetensors import safe_open
from support.checkpoint_models import (
    ADAMW,
    CLASSES,
    IMAGES,
    LABELS,
    ROWS,
    STEPLR,
    VIT,
    assert_equal,
    contents,
    rehash,
    save_small,
    small,
    start,
    trained,
)
from support.effort import full
from support.forks import run_on_two
from support.hardware import slow_compute
from support.models import Tied
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

import autopar
from autopar import ResumeWarning
from autopar.api.checkpoint import read_header, read_plan, read_weights
from autopar.ir.plan import Plan
from autopar.runtime.checkpoint.folder import TRAINING
from autopar.runtime.checkpoint.rank_state import decoded_training
from autopar.runtime.checkpoint.reshard_planners import read_metadata
from autopar.tools.cli.app import app


@dataclass(frozen=True)
class Leg:
    """Results of a run under one mesh that loads a checkpoint, saves it again, and trains on from it twice."""

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
    "vit": {
        "tp": {"tp": 2, "hardware": "slow-compute"}, "pp": {"pp": 2}, "zero": {"dp": 2, "zero": 1},
        "zero 3": {"dp": 2, "zero": 3},
    },
    "convolutions": {"zero": {"dp": 2, "zero": 1}},
}  # fmt: skip
if full():  # each mesh loads what the one before has saved
    MESHES["vit"] |= {
        "zero 3 of four": {"dp": 4, "zero": 3}, "zero 3 of two in four": {"dp": 4, "zero": 3, "dp_shard": 2},
        "zero 0": {"dp": 2, "zero": 0}, "zero 3 with a pipeline": {"dp": 2, "zero": 3, "pp": 2},
        "zero 1 of four": {"dp": 4, "zero": 1},
        "zero 3 with shards": {"dp": 2, "zero": 3, "tp": 2, "hardware": "slow-compute"},
        "zero 3, compiled": {"dp": 2, "zero": 3, "compile": True}, "pp again": {"pp": 2},
    }  # fmt: skip
    MESHES["convolutions"] |= {
        "zero 3": {"dp": 2, "zero": 3},
        "zero 3 of four": {"dp": 4, "zero": 3, "microbatches": 1},
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
            own[key] = leg(name, prod(mesh.get(axis, 1) for axis in ("pp", "tp", "dp")), chosen, given, root / key)
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
from support import traces; traces.share()
from support.checkpoint_models import IMAGES, LABELS, start
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
with start("convolutions", 2, dp=2, zero=1) as pm:
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
    done = run_on_two(tmp_path, TORCHRUN)
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


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("then", [torch.contiguous_format, torch.channels_last])
def test_any_memory_format_goes_on_from_any_other(
    first: torch.memory_format, then: torch.memory_format, tmp_path: Path
) -> None:
    """Fused optimizers read a parameter and its state in the order of their memory."""

    def start(layout: torch.memory_format) -> autopar.ParallelModel:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 72, 3), nn.ReLU(), nn.Conv2d(72, 8, 1), nn.Flatten(), nn.Linear(288, 10))
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
        adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
        return autopar.parallelize(model, 1, x, optimizer=adamw, microbatches=1)

    x, y = torch.randn(8, 3, 8, 8, generator=torch.manual_seed(1)), torch.arange(8)
    with start(first) as pm:
        for _ in range(3):
            pm.train_step(x, y)
        pm.save_checkpoint(tmp_path)
        expected = [pm.train_step(x, y).loss for _ in range(4)]
    with start(then) as pm:
        pm.load_checkpoint(tmp_path)
        assert [pm.train_step(x, y).loss for _ in range(4)] == pytest.approx(expected, rel=1e-5)


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
    with small() as pm, pytest.warns(ResumeWarning, match="has no optimizer: the one of this run starts from scratch"):
        pm.load_checkpoint(saved)


def test_a_checkpoint_taken_before_any_update(tmp_path: Path) -> None:
    with small() as pm:
        pm.save_checkpoint(tmp_path)
        first = pm.train_step(ROWS, CLASSES).loss
        pm.load_checkpoint(tmp_path)
        assert pm.train_step(ROWS, CLASSES).loss == first


EMA = functools.partial(timm.utils.ModelEmaV3, decay=0.9)
# The loss overflows float16 at the first scales, so that the scale is not the default when it is saved.
MIXED: dict[str, Any] = {
    "precision": "fp16", "ema": EMA, "microbatches": 2, "loss_fn": lambda output, y: 30 * F.cross_entropy(output, y)
}  # fmt: skip


def test_averages_and_loss_scale_go_to_another_mesh(tmp_path: Path) -> None:
    with small(**MIXED) as pm:
        skipped = [pm.train_step(ROWS, CLASSES).skipped for _ in range(6)]
        assert skipped[0] and not skipped[-1]
        scale, averages = pm.loss_scale(), pm.ema_state_dict()
        pm.save_checkpoint(tmp_path / "alone")
        assert_equal(read_weights(tmp_path / "alone", ema=True), averages)
        assert_equal(read_weights(tmp_path / "alone"), pm.state_dict())
        assert not torch.equal(averages["0.weight"], pm.state_dict()["0.weight"])
        loss, after = pm.train_step(ROWS, CLASSES).loss, pm.ema_state_dict()
    for devices, given, saved in ((2, "alone", "pipeline"), (1, "pipeline", "again")):
        with small(devices=devices, pp=devices, seed=0, **MIXED) as pm, warnings.catch_warnings():
            warnings.simplefilter("error", ResumeWarning)
            pm.load_checkpoint(tmp_path / given)
            assert pm.loss_scale() == scale < 65536
            assert_equal(pm.ema_state_dict(), averages)
            pm.save_checkpoint(tmp_path / saved)
            assert_equal(contents(tmp_path / saved), contents(tmp_path / given))
            assert pm.train_step(ROWS, CLASSES).loss == pytest.approx(loss, rel=1e-3)
            for name, tensor in pm.ema_state_dict().items():
                torch.testing.assert_close(tensor, after[name], rtol=1e-3, atol=1e-4)


class Swa(AveragedModel):
    """The mean of all weights so far; torch counts the updates in a buffer."""

    def update(self, module: nn.Module, step: int) -> None:
        self.update_parameters(module)


class Counted:
    """Mean of all weights so far. Has a counter, an attribute that the first update sets, and an option."""

    def __init__(self, module: nn.Module, first: float = 1.0) -> None:
        self.module, self.n, self.first = copy.deepcopy(module), 0, first

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        self.n += 1
        self.scale = torch.tensor([self.first if self.n == 1 else 1 / self.n])
        for average, weight in zip(self.module.parameters(), module.parameters(), strict=True):
            average += (weight - average) * self.scale


def after_six_steps(make: Callable[[nn.Module], Any], folder: Path) -> dict[str, torch.Tensor]:
    """Averages of a run that saves after its first step, and then after four."""
    with small(ema=make) as pm:
        for step in range(6):
            pm.train_step(ROWS.roll(step, 0), CLASSES)
            if step in (0, 3):
                pm.save_checkpoint(folder / f"{step + 1}")
        return pm.ema_state_dict()


def resumed(pm: autopar.ParallelModel, folder: Path, steps: Sequence[int]) -> dict[str, torch.Tensor]:
    pm.load_checkpoint(folder)
    for step in steps:
        pm.train_step(ROWS.roll(step, 0), CLASSES)
    return pm.ema_state_dict()


@pytest.mark.parametrize("make", [Swa, Counted])
def test_averages_that_count_for_themselves_go_on_counting(make: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    expected = after_six_steps(make, tmp_path)
    with small(devices=2, pp=2, ema=make) as pm:
        found = resumed(pm, tmp_path / "4", (4, 5))
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name])
        again = resumed(pm, tmp_path / "1", range(1, 6))  # the counts go back as well
        for name, tensor in again.items():
            torch.testing.assert_close(tensor, expected[name])


def test_options_of_an_average_are_those_of_the_run_that_loads(tmp_path: Path) -> None:
    with small(ema=functools.partial(Counted, first=0.5)) as pm:
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(tmp_path)
    training = decoded_training((tmp_path / read_header(tmp_path).data / TRAINING).read_bytes())
    assert training.ema_state == {"n": 1, "scale": torch.tensor([0.5])}
    with small(ema=functools.partial(Counted, first=0.25)) as pm:
        pm.load_checkpoint(tmp_path)
        keeper = pm._ranks.rank.ema.keeper
        assert (keeper.n, keeper.first, keeper.scale) == (1, 0.25, 0.5)


def test_a_checkpoint_without_the_state_of_its_averages(tmp_path: Path) -> None:
    after_six_steps(Counted, tmp_path)
    averages = read_weights(tmp_path / "4", ema=True)
    path = tmp_path / "4" / read_header(tmp_path / "4").data / TRAINING
    fields = torch.load(path, weights_only=True)
    assert fields.pop("ema_state")
    torch.save(fields, path)
    rehash(tmp_path / "4")
    with small(ema=Counted) as pm:
        assert_equal(resumed(pm, tmp_path / "4", ()), averages)
        assert pm._ranks.rank.ema.keeper.n == 0


def test_precision_and_averages_that_come_or_go(saved: Path) -> None:
    came = [
        r"was saved in fp32, here it is fp16: training goes on with other rounding, and the loss scale is "
        r"initialized again\.",
        r"has no averages of weights: the averages of this run start at its weights\.",
    ]
    with small(precision="fp16", ema=EMA) as pm:
        assert_told(pm, saved, came)
        assert_equal(pm.ema_state_dict(), pm.state_dict())
        assert pm.loss_scale() == 65536
        pm.save_checkpoint(saved)
    gone = [
        "was saved in fp16, here it is fp32: training goes on with other rounding, without its loss scale",
        r"has averages of weights; this run has no ema: they are not loaded\.",
    ]
    with small() as pm:
        assert_told(pm, saved, gone)


def assert_told(pm: autopar.ParallelModel, folder: Path, expected: list[str]) -> None:
    """A checkpoint is loaded with these warnings, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResumeWarning)
        pm.load_checkpoint(folder)
    told = [str(warning.message) for warning in caught if warning.category is ResumeWarning]
    assert len(told) == len(expected), told
    for message, pattern in zip(told, expected):
        assert re.search(pattern, message), message


def decayed(params: Any, weight_decay: float = 0.1, scale: float | None = 0.5) -> torch.optim.Optimizer:
    """AdamW with groups of its own for weights and biases, as layer decay makes them."""
    named = list(params.named_parameters())
    kinds = [[p for n, p in named if n.endswith(end)] for end in ("weight", "bias")]
    groups = [{"params": own, "weight_decay": weight_decay * (i == 0)} for i, own in enumerate(kinds)]
    return ADAMW([group | ({"lr_scale": scale} if scale else {}) for group in groups])


def test_other_options_are_told_and_those_saved_stay(tmp_path: Path) -> None:
    with small(optimizer=decayed, lr_scheduler=STEPLR) as pm:
        trained_rows(pm)
        pm.save_checkpoint(tmp_path)
        expected = trained_rows(pm)
    make = functools.partial(decayed, weight_decay=0.2, scale=None)
    other = [
        r"was saved with lr_scale 0\.5, here it is None \(4 weights\): what was saved stays in use\.",
        r"was saved with weight_decay 0\.1, here it is 0\.2 \(2 weights\): what was saved stays in use\.",
    ]
    for devices in (1, 2):
        with small(devices=devices, pp=devices, optimizer=make, lr_scheduler=STEPLR) as pm:
            assert_told(pm, tmp_path, other)
            pm.save_checkpoint(tmp_path / "again")
            assert trained_rows(pm) == pytest.approx(expected, rel=1e-5)
    with small(optimizer=decayed, lr_scheduler=STEPLR) as pm:
        assert_told(pm, tmp_path / "again", [])  # it was saved with what had stayed in use


def trained_rows(pm: autopar.ParallelModel) -> list[float]:
    losses = []
    for _ in range(3):
        losses.append(pm.train_step(ROWS, CLASSES).loss)
        pm.lr_scheduler.step()
    return losses


@pytest.mark.parametrize("name", ["sgd", "momentum", "lion", "nadamw", "rmsprop", "adafactor", "lookahead_adamw"])
def test_any_optimizer_of_timm(name: str, tmp_path: Path) -> None:
    make = functools.partial(timm.optim.create_optimizer_v2, opt=name, lr=1e-2)
    with small(optimizer=make) as pm:
        for _ in range(3):
            pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(tmp_path)
        expected = [pm.train_step(ROWS, CLASSES).loss for _ in range(4)]
    with small(optimizer=make) as pm:
        assert_told(pm, tmp_path, [])
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


def test_a_folder_of_a_run_stands_for_its_last_checkpoint(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "run").mkdir()
    saved.rename(tmp_path / "run" / "last")
    file = tmp_path / "model.safetensors"
    assert export(str(tmp_path / "run"), "-o", str(file)) == f"{file}: 4 tensors of Sequential after 1 update\n"


def test_exports_have_the_name_of_their_format(tmp_path: Path, saved: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(saved), "-o", str(tmp_path / "model.pth")])
    assert done.exit_code == 2 and "must end in .safetensors" in done.stderr and not (tmp_path / "model.pth").exists()


def test_export_of_nothing(tmp_path: Path, saved: Path) -> None:
    for arguments, message in [
        ([str(tmp_path), "-o", str(tmp_path / "x.safetensors")], "is not a checkpoint"),
        ([str(saved), "-o", str(tmp_path / "x.safetensors"), "--ema"], "has no averages of weights"),
        ([str(saved), "-o", str(tmp_path / "no" / "x.safetensors")], "Cannot write"),
    ]:
        done = CliRunner().invoke(app, ["export", *arguments])
        assert (done.exit_code, message in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    "output", ["checkpoint.json", "data-1/__0_0.distcp", "new.safetensors", "data-1/new", "../link/x", "../file"]
)
@pytest.mark.parametrize("command", ["export", "plan"])
def test_no_command_writes_into_a_checkpoint(
    command: str, output: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved.parent / "link").symlink_to(saved)
    (saved.parent / "file").symlink_to(saved / "checkpoint.json")
    monkeypatch.chdir(saved.parent)
    path = Path(saved.name) / output
    before = files_of(saved)
    first = [saved.name] if command == "export" else ["test_vit", "--devices", "2"]
    done = CliRunner().invoke(app, [command, *first, "-o", str(path)])
    assert done.exit_code == 2, done.output
    assert f"Cannot write to {path}: it lies in the checkpoint " in done.output, done.output
    named = "link" if "link" in output else saved.name
    assert f"{named}, whose files must stay as they were saved." in done.output, done.output
    assert "Give a file outside of that folder." in done.output
    assert files_of(saved) == before


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_path_through_a_checkpoint_may_lead_out_of_it(saved: Path) -> None:
    before = files_of(saved)
    export(str(saved), "-o", str(saved / ".." / "model.safetensors"))
    assert (saved.parent / "model.safetensors").exists() and files_of(saved) == before


def test_a_file_of_another_program_by_the_headers_name_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "checkpoint.json").write_text("{}")
    export(str(saved), "-o", str(tmp_path / "theirs" / "model.safetensors"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_exported_files_are_as_open_as_any_other(umask: int, mode: int, saved: Path, tmp_path: Path) -> None:
    file, link = tmp_path / "new" / "model.safetensors", tmp_path / "new" / "link.safetensors"
    file.parent.mkdir()
    link.symlink_to(file)
    before = os.umask(umask)
    try:
        export(str(saved), "-o", str(link))
        assert S_IMODE(file.stat().st_mode) == mode and link.is_symlink()
        file.chmod(0o600)  # somebody's decision
        export(str(saved), "-o", str(file))
        assert S_IMODE(file.stat().st_mode) == 0o600
    finally:
        os.umask(before)
