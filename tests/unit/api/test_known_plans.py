"""Plans of which an expert knows the answer, listed in docs/search.md: the decision, and the range of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hardware import with_network

import autopar
from autopar.api.model_source import ModelSource
from autopar.errors import InfeasibleError
from autopar.solve.space.constraints import USABLE_MEMORY

DOCS = (Path(__file__).parents[3] / "docs" / "search.md").read_text()
ROW = re.compile(
    r"^\| `(\S+)` \| (\d+) × (\S+) \| (\d+) \| ([^|]*) \| ([^|]+) \| (?:([\d.]+)–([\d.]+) ms|–) \|", re.MULTILINE
)
ROWS = [match.groups() for match in ROW.finditer(DOCS)]
MACHINES = {name: rest for name, *rest in re.findall(r"^\| `(\S+)` \| (\S+) \| (\w+ = [^|]+) \|$", DOCS, re.MULTILINE)}
MODEL_OPTIONS = ("img_size", "num_classes")


def planned(folder: Path, name: str, devices: str, machine: str, batch: str, asked: str) -> autopar.Plan:
    given = {key: int(value) if value.isdigit() else value for key, value in re.findall(r"(\w+) (\w+)", asked)}
    model = ModelSource(name, {key: given.pop(key) for key in MODEL_OPTIONS if key in given})
    hardware = str(with_network(folder, machine, *MACHINES[machine])) if machine in MACHINES else machine
    side = given.pop("side", None)
    inputs: dict[str, Any] = {"batch_size": int(batch)}
    if side is not None:
        inputs = {"example_inputs": (torch.empty(int(batch), 3, side, side, device="meta"),)}
    options: dict[str, Any] = {"precision": "bf16-params", "hardware": hardware, "cost": "analytic"} | given
    return autopar.plan(model, int(devices), **inputs, **options)


def decision_of(plan: autopar.Plan) -> str:
    """``dp 8, ZeRO-1``: sizes of the mesh above 1, whether most layers split the height, ZeRO stage, whether ranks have
    several stages, in a V or not, or recompute."""
    sizes = {axis: getattr(plan.mesh, axis) for axis in ("pp", "tp", "dp")}
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size > 1] or ["one device"]
    rows = [how for block in plan.blocks for how in block.rows.values()]
    parts += ["height"] if 2 * sum(how.startswith("height") for how in rows) > len(rows) else []
    parts += [plan.replicas.zero_text] if plan.zero else []
    parts += ["zb-v" if plan.placement.is_v else "interleaved"] if plan.chunks > 1 else []
    return ", ".join([*parts, *(["recomputing"] if any(stage.recompute != "none" for stage in plan.stages) else [])])


def test_the_table_is_read() -> None:
    assert len(ROWS) == DOCS.count("\n| `") - len(MACHINES) and len(ROWS) >= 37
    assert {row[2] for row in ROWS} >= MACHINES.keys() and len(MACHINES) == 2


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} on {row[1]} {row[2]}, {row[4]}")
def test_the_plan_is_the_expert_s(tmp_path: Path, row: tuple[str, ...]) -> None:
    *question, decision, least, most = row
    if decision == "does not fit":
        with pytest.raises(InfeasibleError, match=r"stage 0 needs 5\d\.\d GiB"):
            planned(tmp_path, *question)
        return
    plan = planned(tmp_path, *question)
    assert decision_of(plan) == decision
    assert float(least) <= 1e3 * plan.prediction.step_seconds <= float(most)
    assert max(plan.prediction.peak_bytes) <= USABLE_MEMORY * plan.hardware.memory_bytes
