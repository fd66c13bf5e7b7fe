"""Plan files: round trip, and every way in which one can be wrong names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import plan_by_hand
from torch import nn

from autopar import Plan, PlanError


def plan() -> Plan:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return plan_by_hand(model, torch.randn(4, 8), 2, ["2.linear"])


def changed(path: str, value: Any) -> str:
    """The plan's JSON with the field at a dotted path replaced."""
    data = json.loads(plan().to_json())
    *parents, last = path.split(".")
    place: Any = data
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(data)


def test_round_trip(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 99, "field schema_version is 99"),
        ("schedule", "forward-only", "field schedule: is forward-only, which has no training step"),
        ("schedule", "zigzag", "Field schedule"),
        ("batch", 0, "field batch: is 0"),
        ("microbatches", 9, "field microbatches: 9 microbatches of a batch of 4"),
        ("mesh.tp", 2, "field mesh: tp=2"),
        ("mesh.pp", 3, "field stages: has 2 entries"),
        ("stages.1.params", -1, r"field stages\.1\.params: is -1"),
        ("stages.0.forward_seconds", float("nan"), r"Field stages\.0\.forward_seconds"),
        ("stages.0.ranks", [1], r"field stages\.0\.ranks"),
        ("stages.0.extra", 1, r"stages\.0\.extra"),
        ("prediction.peak_bytes", [1], r"field prediction\.peak_bytes: has 1 entries for 2 stages"),
        ("prediction.step_seconds", 0.0, r"field prediction\.step_seconds"),
        ("shardings", {"0.weight": "rows"}, "field shardings: must be empty"),
        ("exceptions", {"0.linear": 7}, r"field exceptions\.0\.linear: names stage 7"),
    ],
)
def test_wrong_fields_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(changed(path, value))


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(plan().to_json()[:200])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00plan")
    for name, message in (("cut.json", "not a complete JSON"), ("binary.json", "is not text"), ("no.json", "No such")):
        with pytest.raises(PlanError, match=message):
            Plan.load(tmp_path / name)
