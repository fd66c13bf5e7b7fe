"""Optimizers, schedules and averages under every mesh of real processes, against one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import timm.utils
import torch
import torch.nn.functional as F
from support.effort import full, only
from support.forks import SCRIPTS, run_ranks
from support.hardware import slow_compute
from support.models import tiny_vit
from support.reference import assert_all_close, assert_close
from support.training_worker import CASES

import autopar
from autopar.cost.hardware.load import cost_model_dir
from autopar.train import schedule, timm_optimizer

SGD = functools.partial(torch.optim.SGD, lr=0.1)
WORLDS = (2, 4) if full() else (2,)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], list[Any]]:
    """For each case and mesh of `training_worker`, what each rank found."""
    folder = tmp_path_factory.mktemp("training")
    worker, hardware = SCRIPTS / "training_worker.py", str(slow_compute(folder))
    failures = []
    for ranks in WORLDS:
        done = run_ranks(ranks, worker, str(folder), hardware)
        if done.returncode:
            failures.append(done.stderr[-3000:])
    found: dict[tuple[str, str], list[Any]] = {}
    for file in sorted(folder.glob("*.json")):
        name, mesh, _ = file.stem.split("+")
        data = json.loads(file.read_text())
        found.setdefault((name, mesh), []).append(data)
        failures += [f"{file.stem}: {data['error']}"] if data["error"] else []
    assert not failures, "\n".join(failures)
    return found


def cases(kind: str) -> list[Any]:
    """Names and meshes of the cases with averages (``ema``), with a schedule alone, or with neither (``optimizer``)."""
    kinds = {name: "ema" if c.ema else "schedule" if c.schedule else "optimizer" for name, c in CASES.items()}
    cells = {
        (name, "-".join(map(str, mesh))): mesh not in case.later
        for name, case in CASES.items() if kinds[name] == kind for mesh in case.meshes
    }  # fmt: skip
    return only([cell for cell, kept in cells.items() if kept], cells)


def assert_equals_one_device(found: list[Any], quantities: set[str]) -> None:
    """Every quantity of every rank within its tolerance."""
    for rank, data in enumerate(found):
        assert data["worst"].keys() == {"learning rates", "loss", "norm", "weights"} | quantities
        for quantity, excess in data["worst"].items():
            assert excess <= 1, f"rank {rank}: {quantity} is {excess:.2f} times its tolerance off"


@pytest.mark.parametrize(("name", "mesh"), cases("optimizer"))
def test_equals_one_device(trained: Any, name: str, mesh: str) -> None:
    assert_equals_one_device(trained[name, mesh], set())


def test_whole_parameters_have_their_state_on_one_shard(trained: Any) -> None:
    shapes = {name: list(p.shape) for name, p in tiny_vit(2, embed_dim=32, num_heads=4).named_parameters()}
    first, second = (data["slots"] for data in trained["lamb", "1-2-1"])
    split = set(first) ^ set(second)
    assert {"blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"} <= split and "norm.bias" in set(first) & set(second)
    assert set(first) | set(second) == set(shapes)
    for name in split:  # the two moments
        assert (first | second)[name] == [shapes[name]] * 2
    elements = [sum(torch.Size(shapes[n]).numel() for n in split & set(own)) for own in (first, second)]
    assert max(elements) < 1.1 * min(elements)


@pytest.mark.full
def test_workers_of_a_plain_script(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = tiny_vit(1, embed_dim=32, num_heads=4)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    lamb: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05, "eps": 1e-3}
    cosine = schedule("cosine", 4, 1, warmup_epochs=1, step_on_epochs=False)
    ema = functools.partial(timm.utils.ModelEmaV3, decay=0.9)
    plan = autopar.plan(model, 2, x, hardware=str(slow_compute(tmp_path)), memory="64GiB", tp=2, microbatches=2)
    with autopar.parallelize(
        model, 2, x, optimizer=timm_optimizer(model, "lamb", **lamb), plan=plan, lr_scheduler=cosine, ema=ema
    ) as pm:
        optimizer = timm.optim.create_optimizer_v2(model, "lamb", **lamb)
        scheduler, average = cosine(optimizer), ema(model)
        for step in range(1, 4):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step_update(step)
            average.update(model, step=step)
            pm.train_step(x, y)
            pm.lr_scheduler.step_update(step)
            assert pm.learning_rates() == [group["lr"] for group in optimizer.param_groups]
        assert_all_close(pm.state_dict(), dict(model.state_dict()), "weight")
        assert_all_close(pm.ema_state_dict(), dict(average.module.state_dict()), "average")
        with pm.ema_weights(), torch.no_grad():
            assert_close(pm.eval()(x), average.module(x), "output")


@pytest.mark.parametrize(("name", "mesh"), cases("ema"))
def test_equals_timm_on_one_device(trained: Any, name: str, mesh: str) -> None:
    assert_equals_one_device(
        trained[name, mesh], {"averages", "outputs of averages", "weights within", "outputs after"}
    )


@pytest.mark.parametrize(("name", "mesh"), cases("schedule"))
def test_layer_decay_under_a_schedule_equals_timm(trained: Any, name: str, mesh: str) -> None:
    assert_equals_one_device(trained[name, mesh], set())


# One schedule for both optimizers: a searched one may keep less where state takes more.
@pytest.mark.parametrize(
    "mesh", only([{"tp": 2}], [{"pp": 2, "schedule": "1f1b"}, {"dp": 2, "zero": 1}, {"tp": 2}]), ids=str
)
def test_what_is_predicted_is_what_ranks_keep(mesh: dict[str, Any], tmp_path: Path) -> None:
    # Where collectives take no time, all is split with any optimizer.
    text, path = (cost_model_dir() / "cpu-generic.toml").read_text(), tmp_path / "near.toml"
    head, collective = text.split("[collective]")
    collective = collective.replace("value = 2.4,", "value = 2.4e9,").replace("value = 340,", "value = 0,")
    path.write_text(f"{head}[collective]{collective}")
    model, x, y = tiny_vit(2, num_heads=4), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    predicted: list[list[int]] = []
    measured: list[list[int]] = []
    for make in (SGD, functools.partial(torch.optim.AdamW, lr=1e-3)):
        with autopar.parallelize(model, 2, x, optimizer=make, microbatches=2, hardware=str(path), **mesh) as pm:
            pm.train_step(x, y)
            predicted.append([pm.plan.prediction.peak_bytes[rank] for rank in range(2)])
            measured.append([pm.stats()[rank].optimizer_bytes for rank in range(2)])
    assert measured[0] == [0, 0]
    for rank in range(2):
        # Replicas share whole parameters out as evenly as they can; the prediction has exact halves, and of parts that
        # differ the largest.
        kept = max(measured[1]) if "tp" in mesh else measured[1][rank]
        expected = pytest.approx(kept, rel=0.1 if "dp" in mesh else 0.01)
        assert predicted[1][rank] - predicted[0][rank] == expected
