"""Plan files: round trip, and every way in which one can be wrong names its field."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handmade import plan_by_hand
from torch import nn

from autopar import Plan, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan_parts import BlockSharding, Collective
from autopar.ir.units import TIME, text

BACK = {"src": 1, "dst": 0, "num_bytes": 8, "seconds": 1e-6}  # a message of gradients


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
    assert repr(plan()) == f"Plan({plan().model.name}, {plan().mesh}, {text(plan().prediction.step_seconds, TIME)})"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    narrow = replace(plan(), reduce_dtype="bfloat16")
    assert Plan.from_json(narrow.to_json()) == narrow != plan()
    earlier = json.loads(plan().to_json())
    assert earlier.pop("reduce_dtype") == "float32"
    assert Plan.from_json(json.dumps(earlier)) == plan()


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "plan.json")
    plan().save(link)
    assert link.is_symlink() and Plan.load(tmp_path / "plan.json") == plan()
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(pipe.read_text)
        plan().save(pipe)
        assert Plan.from_json(text.result()) == plan() and pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        plan().save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "pipe", "plan.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 99, "field schema_version is 99"),
        ("schedule", "forward-only", "field schedule: is forward-only, which has no training step"),
        ("schedule", "zigzag", "Field schedule"),
        ("batch", 0, "field batch: is 0"),
        ("microbatches", 9, "field microbatches: 9 microbatches of a batch of 4"),
        ("mesh.tp", 0, r"field mesh\.tp: is 0, must be at least 1"),
        ("mesh.tp", 2, r"field prediction\.peak_bytes: has 2 entries for 4 ranks"),
        ("mesh.dp", 3, r"field prediction\.peak_bytes: has 2 entries for 6 ranks"),
        ("zero", 4, "Field zero"),
        ("reduce_dtype", "float16", "Field reduce_dtype"),
        ("zero", 1, r"field zero: needs replicas to share the optimizer's state; mesh\.dp is 1"),
        ("strategies", {"0.linear": "n"}, r"field strategies: must be empty while mesh\.tp is 1"),
        ("mesh.pp", 3, "field stages: has 2 entries"),
        ("stages.1.params", -1, r"field stages\.1\.params: is -1"),
        ("stages.0.forward_seconds", float("nan"), r"Field stages\.0\.forward_seconds"),
        ("stages.0.ranks", [1], r"field stages\.0\.ranks"),
        *(
            ("stages.0.recompute", level, rf'field stages\.0\.recompute: is {text}, must be "none", "all" or a number')
            for level, text in (
                (0, "0"),
                (-2, "-2"),
                (True, "True"),
                (1.5, r"1\.5"),
                ("some", "'some'"),
                (None, "None"),
            )
        ),
        ("stages.0.num_segments", -1, r"field stages\.0\.num_segments: is -1"),
        ("stages.0.num_segments", 1.5, r"Field stages\.0\.num_segments"),
        ("stages.0.extra", 1, r"stages\.0\.extra"),
        ("prediction.peak_bytes", [1], r"field prediction\.peak_bytes: has 1 entries for 2 ranks"),
        ("prediction.step_seconds", 0.0, r"field prediction\.step_seconds"),
        ("shardings", {"0.weight": "rows"}, r"field shardings: must be empty while mesh\.tp is 1"),
        (
            "stages.0.memory",
            {"weight_bytes": -1, "microbatch_bytes": 0, "transient_bytes": 0},
            r"field stages\.0\.memory\.weight_bytes: is -1",
        ),
        (
            "messages",
            [{"src": 0, "dst": 2, "num_bytes": 8, "seconds": 1e-6}],
            r"messages\.0: goes from stage 0 to 2 of 2",
        ),
        ("messages", [{"src": 0, "dst": 1, "num_bytes": 8, "seconds": -1.0}], r"messages\.0: has 8 bytes and -1\.0 s"),
        ("messages", [BACK], r"messages\.0: gradients go from stage 1 to 0, but no message goes from stage 0 to 1"),
        ("messages", [BACK, BACK, BACK | {"src": 0, "dst": 1}], "field messages: 3 messages for 2 pairs of stages"),
        ("exceptions", {"0.linear": 7}, r"field exceptions\.0\.linear: names stage 7"),
    ],
)
def test_wrong_fields_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(changed(path, value))


def wide(**changes: Any) -> str:
    """The JSON of a plan for 8 ranks, sharded, with fields replaced."""
    base = plan()
    stages = tuple(replace(s, ranks=tuple(range(4 * i, 4 * i + 4))) for i, s in enumerate(base.stages))
    made = replace(
        base, mesh=Mesh(2, 2, 2), stages=stages, prediction=replace(base.prediction, peak_bytes=(0,) * 8),
        shardings={"*.weight": "tp:0"}, strategies={"*.linear": "n"}, zero=1,
        blocks=(BlockSharding("*", 2, {"linear": "rows / 2"}, (Collective("*", "all-reduce", "forward", 4, 1e-6),)),),
    )  # fmt: skip
    return replace(made, **changes).to_json()


def test_a_stage_recomputes_fewer_segments_than_it_has() -> None:
    data = json.loads(plan().to_json())
    data["stages"][1] |= {"recompute": 3, "num_segments": 4}
    made = Plan.from_json(json.dumps(data))
    assert made.stages[1].recompute == 3 and made.decision.endswith("; recomputing on stages 1 (3 of 4 segments)")
    data["stages"][1]["recompute"] = 4
    with pytest.raises(
        PlanError, match=r'stages\.1\.recompute: is 4, the stage has 4 segments\. Use fewer, or "all"\.'
    ):
        Plan.from_json(json.dumps(data))
    del data["stages"][1]["num_segments"]
    data["stages"][0]["recompute"] = "all"
    assert Plan.from_json(json.dumps(data)).decision.endswith("; recomputing on stages 0, 1 (first 4 segments)")


def test_sharded_plans_round_trip() -> None:
    assert Plan.from_json(wide()).blocks[0].collectives[0].kind == "all-reduce"
    assert Plan.from_json(wide()).mesh.ranks(1) == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shardings": {"*.weight": "rows"}}, r"field shardings\.\*\.weight: 'rows' is no layout; write tp:DIM"),
        ({"batch": 5}, r"field mesh\.dp: 2 replicas cannot share a batch of 5 evenly"),
        ({"microbatches": 3}, "field microbatches: 3 microbatches of a replica's batch of 2"),
        ({"stages": plan().stages}, r"field stages\.0\.ranks: is \[0\], must be 0 to 3"),
    ],
)
def test_wrong_fields_of_sharded_plans_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(wide(**changes))


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(plan().to_json()[:200])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00plan")
    (tmp_path / "bench.json").write_text('{"schema_version": 1, "model": "vit", "plan": "pp 2", "rows": []}')
    (tmp_path / "list.json").write_text("[1]")
    neither = r"\.json is JSON but not a plan: it has neither a mesh nor stages\. Give a file that `autopar plan … -o`"
    for name, message in (
        ("cut.json", "not a complete JSON"), ("binary.json", "is not text"), ("no.json", "No such"),
        ("bench.json", f"bench{neither}"), ("list.json", f"list{neither}"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            Plan.load(tmp_path / name)
