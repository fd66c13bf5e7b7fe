"""Measurements in real processes: what is kept, what fails, and what a kill leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import invoke
from support.effort import full
from support.measured import plan

from autopar.cost.ops.overlap import OVERLAP_WINDOWS
from autopar.errors import WorkerError
from autopar.ir.plan import Plan
from autopar.measure.device import ProfileSetting
from autopar.measure.machine.cases import COLLECTIVES, FUSIONS, Case
from autopar.measure.machine.measure import measure
from autopar.measure.machine.points import load_points
from autopar.measure.regions import region_times as making


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path


def test_a_real_measurement_and_its_reuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes: as many as devices, and none where everything is known."""
    monkeypatch.setattr(making, "MAX_STEADY_SPREAD", 99.0)  # while other tests use the processors
    first = plan(cost="measured", dp=2, microbatches=2)
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    assert first.hardware.cost == "measured" and len(files) >= 3
    again = plan(cost="auto", dp=2, microbatches=2)
    assert again.prediction == first.prediction
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == files


def test_the_command_times_what_the_choice_hangs_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes; a second command takes the times from disk and makes an equal plan."""
    monkeypatch.setattr(making, "MAX_STEADY_SPREAD", 99.0)  # while other tests use the processors
    plans: list[Plan] = []
    for number in range(2):
        file = folder / f"{number}.json"
        flags = ["--devices", "2", "--batch", "16", "--dp", "2", "--measure-seconds", "200", "--output", str(file)]
        code, out, error = invoke("plan", "test_vit", *flags)
        assert code == 0, error
        plans.append(Plan.load(file))
        said = plans[-1].solver.measuring
        assert said is not None and said.num_timed == said.num_regions > 3
        source = " in " if number == 0 else ", all of them earlier; "
        assert f"measured {said.num_timed} of {said.num_timed} regions{source}" in " ".join(out.split())
    assert plans[1] == replace(plans[0], solver=plans[1].solver)


@pytest.mark.full
def test_a_process_that_fails_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "WORKER", "autopar.measure.regions.no_such_worker:run")
    with pytest.raises(
        WorkerError, match=r"The process that times VisionTransformer .* ended; it said last: .*no_such"
    ):
        plan(cost="measured", dp=2, microbatches=1)


@pytest.mark.full
def test_killed_while_measuring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is killed: its worker goes, and the next plan starts from what is whole."""
    script = (
        "import autopar, torch, autopar.measure.regions.region_times as keeping\nkeeping.MAX_STEADY_SPREAD = 99\n"
        "from timm.models.vision_transformer import VisionTransformer as V\n"
        "autopar.plan(V(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=10).to('meta'), 2,"
        " torch.empty(16, 3, 32, 32, device='meta'), dp=2, microbatches=1, cost='measured')"
    )
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | paths)
    deadline = time.monotonic() + 120
    while not list(folder.rglob("*.json")) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before anything was measured"
        time.sleep(0.05)
    process.kill()
    process.wait()
    kept = set(folder.rglob("*.json"))
    assert kept
    monkeypatch.setattr(making, "MAX_STEADY_SPREAD", 99.0)
    assert plan(cost="measured", dp=2, microbatches=1).hardware.cost == "measured"
    assert kept <= set(folder.rglob("*.json"))


SMALL = (
    Case("capacity"),
    Case("launch", "plain"),
    Case("matmul", "backward", "bfloat16", (4, 8, 8)),
    Case("attention", "both ways", "float32", (1, 2, 8, 8)),
    Case("convolution", "both ways", "float32", (1, 4, 4, 8, 3, 1, 2)),
    Case("depthwise", "both ways", "float32", (1, 4, 4, 8, 3, 1, 4)),
    Case("memory", "layer_norm", "float32", (1024,)),
    Case("optimizer", "", "float32", (1024,)),
    Case("point-to-point", "", "", (64,), 2),
    *(Case(kind, "", "", (64,), 2) for kind in COLLECTIVES),
    *(Case("overlap", name, "bfloat16", (8, 4, 8), 2, fusion) for name in OVERLAP_WINDOWS for fusion in FUSIONS),
)


@pytest.mark.full
def test_two_processes_measure_every_kind(tmp_path: Path) -> None:
    setting, seen = ProfileSetting("toy", "cpu", "2.15", 1, 2, 2), []
    cases = SMALL if full() else tuple({case.kind: case for case in SMALL}.values())
    measure(setting, cases, tmp_path / "m.part", (), lambda done, name: seen.append((done, name)))
    kept = load_points(tmp_path / "m.part", setting)
    assert [p.name for p in kept.points] == [case.name for case in cases]
    assert all(p.value > 0 for p in kept.points)
    assert seen[-1] == (len(cases), "")


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    setting, broken = ProfileSetting("toy", "cpu", "2.15", 1, 1, 1), Case("matmul", "forward", "float31", (4, 8, 8))
    with pytest.raises(WorkerError, match=r"Rank 0 failed while measuring .*float31.*m.part"):
        measure(setting, (broken,), tmp_path / "m.part", (), lambda done, name: None)
