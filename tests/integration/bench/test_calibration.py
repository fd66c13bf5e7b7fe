"""`autopar bench --calibrate`: predicted against measured, over several commands, and what goes wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from support.bench import FLAGS, request
from support.cli import invoke

from autopar.cost.hardware.load import cost_model_dir, load_hardware
from autopar.errors import UsageError
from autopar.ir.mesh import Mesh
from autopar.ir.text import rendered
from autopar.tools.bench.calibration import Calibration, band_text, calibrate
from autopar.tools.bench.calibration_point import CalibrationPoint
from autopar.tools.bench.outcome import BaselineOutcome, RankFailure
from autopar.tools.report.bench_table import calibration_parts, summary
from autopar.tools.report.calibration_picture import figure_of, kind_of
from autopar.tools.report.figure import save_figure

PAIR = Mesh(2)


def point(plan: str, predicted: float, measured: float, mesh: Mesh = PAIR) -> CalibrationPoint:
    return CalibrationPoint("vit", 8, "fp32", plan, mesh, predicted, measured, (90, 240), (100, 200))


FOUND = Calibration("a box", "cpu-generic", "analytic", "most bytes in tensors", ("autopar bench a",), (
    point("pp 2", 0.09, 0.1), point("dp 2", 0.11, 0.1, Mesh(1, 1, 2)), point("tp 2", 0.15, 0.1, Mesh(1, 2)),
))  # fmt: skip


def test_errors_are_relative_to_what_was_measured() -> None:
    assert [p.time_error for p in FOUND.points] == pytest.approx([-0.1, 0.1, 0.5])
    assert FOUND.points[0].memory_errors == pytest.approx((-0.1, 0.2))
    assert (FOUND.time.median, FOUND.time.worst) == pytest.approx((0.1, 0.5))
    assert (FOUND.peaks.median, FOUND.peaks.worst) == pytest.approx((0.15, 0.2))
    assert dict(summary(FOUND)) == {
        "time": "median 10.0 %, worst 50.0 % of 3 plans", "memory": "median 15.0 %, worst 20.0 % of 6 ranks"
    }  # fmt: skip


def test_the_table() -> None:
    printed = rendered(calibration_parts(FOUND), 100, color=False)
    assert FOUND._repr_html_().count("<table") == 3  # in notebooks
    assert re.search(r"vit, 8 +90\.0 ms +100\.0 ms +-10\.0 % +240 B +200 B +\+20\.0 %\n  pp 2\n", printed), printed
    assert "worst 50.0 % of 3 plans" in printed


def test_the_band_of_a_cost_model_is_the_worst_step(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    two = [replace(p, parts=parts) for p, parts in zip(FOUND.points, [("matmul float32", "memory"), ("memory",)])]
    told = band_text(replace(FOUND, points=tuple(two)), date(2026, 11, 22))
    path.write_text((cost_model_dir() / "cpu-generic.toml").read_text() + told)
    calibration = load_hardware(path).calibration["analytic"]
    assert (calibration.error, calibration.covers) == (pytest.approx(0.1), ("matmul float32", "memory"))
    assert "date = 2026-11-22" in told
    exact = replace(FOUND, points=(point("pp 2", 0.1, 0.1),))
    assert "value = 0.001, " in band_text(exact, date(2026, 11, 22))


def test_a_later_measurement_replaces_that_of_the_same_plan() -> None:
    later = replace(FOUND, commands=("autopar bench b",), points=(point("pp 2", 0.1, 0.1), point("pp 2 again", 1, 1)))
    joined = FOUND.merged_with(later)
    assert [(p.plan, p.predicted_seconds) for p in joined.points] == [
        ("pp 2", 0.1), ("dp 2", 0.11), ("tp 2", 0.15), ("pp 2 again", 1)
    ]  # fmt: skip
    assert joined.commands == ("autopar bench a", "autopar bench b")
    with pytest.raises(UsageError, match=r"is of another machine: a box there, a tower here\. Write to another file"):
        FOUND.merged_with(replace(FOUND, machine="a tower"))
    with pytest.raises(UsageError, match="is of another cost model: cpu-generic there, mine here"):
        FOUND.merged_with(replace(FOUND, hardware="mine"))


def test_files_round_trip_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(FOUND.to_json())
    assert Calibration.load(path) == FOUND
    for text in ("{", "[]", json.dumps({"machine": "a box"}), FOUND.to_json().replace("0.09", '"quick"')):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"is no calibration to add to: .* Write to another file"):
            Calibration.load(path)
    path.write_text(FOUND.to_json().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(UsageError, match="has schema_version 9, this autopar adds to 1"):
        Calibration.load(path)


def test_a_picture_has_a_mark_for_every_plan_and_rank(tmp_path: Path) -> None:
    times, peaks = figure_of(FOUND).axes
    marks = [{c.get_label(): len(c.get_offsets()) for c in axes.collections[:-1]} for axes in (times, peaks)]
    assert marks == [{"pipeline": 1, "tensor": 1, "data": 1}, {"pipeline": 2, "tensor": 2, "data": 2}]
    assert "median error 10.0 %, worst 50.0 %" in times.get_title() and "MiB" in peaks.get_title()
    save_figure(figure_of(FOUND), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="Cannot write the picture"):
        save_figure(figure_of(FOUND), tmp_path)
    assert [kind_of(mesh) for mesh in (Mesh(1), Mesh(2, 1, 2))] == ["one device", "mixed"]


@pytest.mark.full
def test_plans_are_run_and_files_grow(tmp_path: Path) -> None:
    path, picture = tmp_path / "c.json", tmp_path / "c.png"
    common = [*FLAGS, "--batch", "8", "--calibrate", "--steps", "2", "--warmup", "1", "-o", str(path)]
    code, out, error = invoke("bench", *common, "--pp", "2")
    assert code == 0 and "of 1 plan" in out, error
    assert ("[calibration]\ncovers = " in out) is (Calibration.load(path).time.worst < 1)
    code, out, error = invoke("bench", *common, "--pp", "1", "--dp", "2", "--png", str(picture))
    assert code == 0 and "of 2 plans" in out and picture.exists(), error
    found = Calibration.load(path)
    assert [p.mesh for p in found.points] == [Mesh(2), Mesh(1, 1, 2)]
    for own in found.points:
        assert own.predicted_seconds > 0 and own.measured_seconds > 0 and len(own.measured_bytes) == 2
        assert all(abs(e) < 0.5 for e in own.memory_errors)


def test_every_mesh_is_tried_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "autopar.tools.bench.run.run_baseline",
        lambda *told: BaselineOutcome((), RankFailure("Exception", "out of order")),
    )
    with pytest.raises(UsageError, match=r"No plan ran, so there is nothing to compare\. .*: out of order"):
        calibrate(request(devices=4, constraints={"memory": "1GiB"}, microbatch_sizes=None), lines.append)
    running = [re.sub(r", .*", "", line) for line in lines if line.endswith("running")]
    assert len(running) == 6 and {line.split("] ")[1] for line in running} == {
        "pp 4", "pp 2 × tp 2", "pp 2 × dp 2", "tp 4", "tp 2 × dp 2", "dp 4"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "ddp"], "--calibrate runs plans alone: leave --only out"),
        (["--microbatch-sizes", "4"], "leave --microbatch-sizes out"),
        (["--trace", "t.json"], "leave --trace out"),
        (["-o", "notes.txt"], "notes.txt is no calibration to add to"),
    ],
)
def test_bad_input(flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.tools.bench.run.run_baseline", None)  # nothing is started
    (tmp_path / "notes.txt").write_text("mine")
    code, out, error = invoke("bench", *FLAGS, "--batch", "8", "--calibrate", *flags)
    assert code == 2 and out == "" and message in " ".join(error.split()), error
    assert (tmp_path / "notes.txt").read_text() == "mine"
