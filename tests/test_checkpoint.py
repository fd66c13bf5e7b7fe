"""Checkpoints: every state under every mesh, whole at every moment, and one message for whatever is wrong with one."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors import safe_open
from test_mesh_parity import slow_compute
from test_torchrun import torchrun
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typer.testing import CliRunner
from zoo import Tied, tiny_vit

import autopar
from autopar import CheckpointError, ResumeWarning, UsageError
from autopar.checkpoints import read_header, read_plan, read_weights
from autopar.cli import app
from autopar.ir import REPLICATED, Plan
from autopar.runtime.contents import Piece, decoded_training
from autopar.runtime.planners import DataReader, PartsLoadPlanner, read_metadata
from autopar.shards import chunks

torch.manual_seed(0)
IMAGES, LABELS = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
ROWS, CLASSES = torch.randn(8, 8), torch.randint(0, 4, (8,))
# A larger eps than the default: parameters whose true gradient is zero would amplify the order of sums.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
STEPLR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
VIT: dict[str, Any] = {"embed_dim": 32, "num_heads": 4}


def grouped(params: Any) -> torch.optim.Optimizer:
    """AdamW that decays weights only."""
    named = list(params.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
    ]
    return ADAMW(groups)


class Convolutions(nn.Module):
    """Batch norm on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        block = functools.partial(nn.Conv2d, kernel_size=3, stride=2, padding=1, bias=False)
        self.layers = nn.Sequential(block(3, 8), nn.BatchNorm2d(8), nn.GELU(), block(8, 8), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.layers(x)).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {"vit": lambda: tiny_vit(2, **VIT), "convolutions": Convolutions}


def start(name: str, devices: int = 1, seed: int = 0, **options: Any) -> autopar.ParallelModel:
    """A model with weights that depend on ``seed``."""
    torch.manual_seed(seed)
    given = {"optimizer": grouped, "lr_scheduler": STEPLR, "microbatches": 2} | options
    return autopar.parallelize(MODELS[name](), devices, IMAGES, **given)


def trained(pm: autopar.ParallelModel, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(pm.train_step(IMAGES.roll(step, 0), LABELS.roll(step, 0)).loss)
        pm.lr_scheduler.step()
    return losses


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, and the numbers of the optimizer's state."""
    data = folder / read_header(folder).data
    saved = read_metadata(data).state_dict_metadata
    found: dict[str, torch.Tensor] = {}
    for key, about in saved.items():
        assert isinstance(about, TensorStorageMetadata)
        found[key] = torch.empty(about.size, dtype=about.properties.dtype)
    pieces = [Piece(k, tuple(t.shape), chunks(t.shape, REPLICATED, {}, {}), t) for k, t in found.items()]
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.load({}, storage_reader=DataReader(data), planner=PartsLoadPlanner(lambda _: pieces), no_dist=True)
    training = decoded_training((data / "training.pt").read_bytes())
    for name, state in training.states.items():
        found |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.values.items()}
        found[f"{name} decay"] = torch.as_tensor(training.groups[state.group]["weight_decay"])
    return found


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(actual[n], expected[n])] == []


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
from test_checkpoint import start, trained
import autopar

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
with start("convolutions", 2, dp=2, zero1=True) as pm:
    half = slice(4 * rank, 4 * rank + 4)
    from test_checkpoint import IMAGES, LABELS
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


# -- one small model in this process --------------------------------------------------------------------------------


def small(model: nn.Module | None = None, seed: int = 0, rows: torch.Tensor = ROWS, **options: Any) -> Any:
    torch.manual_seed(7)
    built = model or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    given: dict[str, Any] = {"optimizer": ADAMW} | options
    return autopar.parallelize(built, 1, rows, seed=seed, **given)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `small` after one step."""
    with small() as pm:
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(tmp_path / "saved", {"step": 1})
    return tmp_path / "saved"


@contextmanager
def unchanged(pm: Any) -> Iterator[None]:
    """Whatever fails inside changes nothing, and training goes on."""
    before = pm.state_dict()
    yield
    assert_equal(pm.state_dict(), before)
    assert pm.train_step(ROWS, CLASSES).loss > 0


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


# -- killed, and a full disk ----------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
import torch
from torch import nn
import autopar
from autopar.checkpoints import read_header, read_weights

torch.set_num_threads(1)
folder = sys.argv[1]
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
pm = autopar.parallelize(model, 1, torch.randn(4, 64), optimizer=torch.optim.AdamW)
names = list(pm.state_dict())

def save(counter):
    pm.load_state_dict({n: torch.full_like(t, float(counter)) for n, t in pm.state_dict().items()})
    pm.save_checkpoint(folder, {"counter": counter})

save(0)
begin = time.perf_counter()
save(1)
seconds = time.perf_counter() - begin
leftovers, counter, seen = 0, 1, []
for _ in range(20):
    child = os.fork()  # an import of torch for every kill would take a minute
    if child == 0:
        while True:
            counter += 1
            save(counter)
    time.sleep(random.uniform(0, 3 * seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    leftovers += len([n for n in os.listdir(folder) if n.startswith("data-")]) > 1
    found = read_header(folder).extra["counter"]
    assert found >= counter, (found, counter)
    values = {float(v) for t in read_weights(folder).values() for v in t.unique()}
    assert values == {float(found)}, (values, found)
    seen.append(found)
    counter = found
assert pm.load_checkpoint(folder) == {"counter": counter}
save(counter + 1)
assert len([n for n in os.listdir(folder) if n.startswith("data-")]) == 1
print(f"{seen} {leftovers} killed while writing")
"""


def test_killed_at_any_moment_it_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("killed while writing\n")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more(saved: Path) -> None:
    before = contents(saved)
    with small() as pm:
        with unchanged(pm), files_of_at_most(2048), pytest.raises(CheckpointError) as error:
            pm.save_checkpoint(saved, {"step": 2})
        message = (
            r"saved: File too large on rank 0 .* needs .* KiB, .* free there\. The one that was there is as it was\."
        )
        assert re.search(message, str(error.value))
        assert pm.load_checkpoint(saved) == {"step": 1}
        assert_equal(contents(saved), before)
        assert [path.name for path in saved.glob("data-*")] == ["data-1"]
        pm.save_checkpoint(saved)


def test_a_disk_that_is_too_small(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(saved)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError) as error:
        pm.save_checkpoint(saved)
    assert f"Cannot save a checkpoint to {saved}: No space left on device ({saved}) on rank 0" in str(error.value)
    assert "1,000 B are free there. The one that was there is as it was." in str(error.value)
    assert [path.name for path in saved.glob("data-*")] == ["data-1"]


class Stubborn(torch.optim.SGD):
    """Cannot be saved on the rank that has the last layer, as long as a file is there."""

    marker: str

    def state_dict(self) -> dict[str, Any]:
        if Path(self.marker).exists() and any(len(p) == 4 for group in self.param_groups for p in group["params"]):
            raise OSError(5, "Input/output error")
        return super().state_dict()


def test_one_rank_that_fails_is_one_error_on_all_and_training_goes_on(tmp_path: Path) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "saved"

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = Stubborn(params, lr=0.1)
        optimizer.marker = str(marker)
        return optimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with autopar.parallelize(model, 2, ROWS, optimizer=make, pp=2, microbatches=2) as pm:
        marker.touch()
        with pytest.raises(CheckpointError, match=r"Input/output error on rank 1 \(stage 1\)\. Make room, or choose"):
            pm.save_checkpoint(folder)
        assert list(tmp_path.glob("saved/data-*")) == []
        marker.unlink()
        pm.train_step(ROWS, CLASSES)
        pm.save_checkpoint(folder)
        assert_equal(read_weights(folder), pm.state_dict())


# -- bad input ------------------------------------------------------------------------------------------------------


def edit(saved: Path, **fields: Any) -> None:
    path = saved / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("echo taken",)


def broken(saved: Path, how: str) -> None:
    data = saved / "data-1"
    if how == "no folder":
        shutil.rmtree(saved)
    elif how == "empty":
        (saved / "checkpoint.json").unlink()
    elif how == "foreign":
        (saved / "checkpoint.json").write_text('{"weights": []}')
    elif how == "cut header":
        cut(saved / "checkpoint.json", 100)
    elif how == "newer":
        edit(saved, schema_version=7)
    elif how == "field":
        edit(saved, updates="many")
    elif how == "truncated":
        cut(data / "__0_0.distcp", 1000)
    elif how == "missing":
        (data / "__0_0.distcp").unlink()
    elif how == "elsewhere":
        edit(saved, data="../data-1")
    elif how == "pickle":
        (data / ".metadata").write_bytes(pickle.dumps(Shell()))
        edit(saved, files=json.loads((saved / "checkpoint.json").read_text())["files"] | {
            ".metadata": (data / ".metadata").stat().st_size})  # fmt: skip
    elif how == "noise":
        raw = bytearray((data / "training.pt").read_bytes())
        raw[40:80] = bytes(40)
        (data / "training.pt").write_bytes(raw)
    elif how == "noise in tensors":
        raw = bytearray((data / "__0_0.distcp").read_bytes())
        raw[::7] = bytes(len(raw[::7]))
        (data / "__0_0.distcp").write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", r"saved is not a checkpoint: it does not exist\. Give the folder that save_checkpoint wrote"),
        ("empty", r"saved is not a checkpoint: it has no checkpoint\.json\. Give"),
        ("foreign", r"checkpoint\.json is not of autopar: it has no schema_version\. Give a checkpoint's folder"),
        ("cut header", r"checkpoint\.json is not a complete JSON file: .* at line \d+, column \d+\..* use another"),
        ("newer", r"checkpoint\.json: field schema_version is 7, this autopar reads 1\. Upgrade autopar\."),
        ("field", r"checkpoint\.json is not a valid checkpoint\. Field updates: Input should be a valid integer"),
        (
            "truncated",
            r"is damaged: in data-1, 1 of 3 files .*: __0_0\.distcp has 1,000 of [\d,]+ bytes\. Copy it again",
        ),
        ("missing", r"is damaged: in data-1, 1 of 3 files .*: __0_0\.distcp is missing"),
        ("elsewhere", r"is damaged: in \.\./data-1"),
        ("pickle", r"\.metadata is damaged: it names posix\.system\. Use another"),
        ("noise", r"training\.pt is damaged: .* Use another checkpoint\."),
        ("noise in tensors", r"Cannot load the checkpoint in .*saved: .* on rank 0 .* The model is as it was\."),
    ],
)
def test_a_broken_checkpoint(how: str, message: str, saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken(saved, how)
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(saved)
    assert "taken" not in capfd.readouterr().out


@pytest.mark.parametrize("how", ["foreign", "newer", "cut header"])
def test_a_header_that_is_not_ours_is_not_overwritten(how: str, saved: Path) -> None:
    broken(saved, how)
    text = (saved / "checkpoint.json").read_text()
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError):
        pm.save_checkpoint(saved)
    assert (saved / "checkpoint.json").read_text() == text


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "data-12").mkdir()
    (tmp_path / "data-12" / "photos.tar").write_text("mine")
    with small() as pm:
        pm.save_checkpoint(tmp_path)
        pm.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("data-*")) == ["data-12", "data-14"]


def test_another_model(saved: Path) -> None:
    models = {
        r"another model \(Sequential, here Sequential\)\. Of 4 weights, "
        r"3 other: 0\.weight float32\[16, 8\] there, float32\[24, 8\] here, 0\.bias .* 2\.weight": nn.Sequential(
            nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)
        ),
        r"Of 4 weights, 2 missing there \(1\.weight, 1\.bias\); 2 unknown here \(2\.weight, 2\.bias\)": nn.Sequential(
            nn.Linear(8, 16), nn.Linear(16, 4)
        ),
        r"4 other: 0\.weight float32\[16, 8\] there, float64\[16, 8\] here, .* and 1 more": nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        ).double(),
    }
    for message, model in models.items():
        rows = ROWS.to(next(model.parameters()).dtype)
        with small(model, rows=rows) as pm, pytest.raises(CheckpointError, match=message):
            pm.load_checkpoint(saved)


def test_another_optimizer(saved: Path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    message = (
        r"has the state of AdamW \(amsgrad, betas, .*\), the optimizer here is SGD \(.*momentum.*\)\. Pass the same"
    )
    with small(optimizer=sgd) as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(saved)
    adam = functools.partial(torch.optim.Adam, lr=0.1)
    with small(optimizer=adam) as pm:
        pm.load_checkpoint(saved)  # AdamW but for the decay: the same state
        assert pm.learning_rates() == [0.01]


def test_other_groups(tmp_path: Path) -> None:
    with small(optimizer=grouped, lr_scheduler=STEPLR) as pm:
        pm.save_checkpoint(tmp_path)
    message = r"0\.weight and 0\.bias are in one parameter group here, .*: weight_decay 0\.1 and 0\.0\. Group the"
    with small() as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(tmp_path)

    def apart(params: Any) -> torch.optim.Optimizer:
        return ADAMW([{"params": [p], "weight_decay": 0.1} for p in params])

    message = "here has 4 parameter groups, in the checkpoint it has 2"
    with small(optimizer=apart, lr_scheduler=STEPLR) as pm, pytest.raises(CheckpointError, match=message):
        pm.load_checkpoint(tmp_path)


def test_another_seed_or_batch(saved: Path) -> None:
    with small(seed=3) as pm, pytest.warns(ResumeWarning, match=r"saved with seed 0, here it is 3: .* Pass seed=0"):
        pm.load_checkpoint(saved)
    with small(rows=ROWS[:4]) as pm, pytest.warns(ResumeWarning, match="global batch of 8, here it is 4: gradients"):
        pm.load_checkpoint(saved)
    with small(lr_scheduler=STEPLR) as pm, pytest.warns(ResumeWarning, match="has no learning-rate scheduler"):
        pm.load_checkpoint(saved)


def test_two_savers(saved: Path) -> None:
    script = f"""
import fcntl, sys
file = open({str(saved / ".saving")!r}, "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "locked\n"
    with small() as pm:
        with unchanged(pm), pytest.raises(CheckpointError, match=r"Another process is saving a checkpoint to .*saved"):
            pm.save_checkpoint(saved)
        other.communicate()
        pm.save_checkpoint(saved)


class Watching(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"watch": Path("here")}


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with small() as pm, unchanged(pm):
        with pytest.raises(UsageError, match="extra cannot be saved: Object of type Tensor is not JSON"):
            pm.save_checkpoint(tmp_path, {"loss": torch.zeros(())})
        with pytest.raises(CheckpointError, match=r"Cannot save a checkpoint to .*file: File exists"):
            pm.save_checkpoint(tmp_path / "file")
    watching = functools.partial(Watching, step_size=1)
    message = r"The scheduler state cannot be saved: .*keep other objects out of state_dict\(\)"
    with small(lr_scheduler=watching) as pm, unchanged(pm), pytest.raises(CheckpointError, match=message):
        pm.save_checkpoint(tmp_path)
    assert list(tmp_path.glob("data-*")) == []


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
