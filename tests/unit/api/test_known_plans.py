"""Plans of which an expert knows the answer, listed in docs/search.md: the decision, and the range of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import InfeasibleError

DOCS = Path(__file__).parents[3] / "docs" / "search.md"
ROW = re.compile(
    r"^\| `(\S+)` \| (\d+) × (\S+) \| (\d+) \| ([^|]*) \| ([^|]+) \| ([\d.]+)–([\d.]+) ms \|", re.MULTILINE
)
ROWS = [match.groups() for match in ROW.finditer(DOCS.read_text())]


def planned(name: str, devices: str, machine: str, batch: str, asked: str) -> autopar.Plan:
    given: dict[str, Any] = {flag: int(value) for flag, value in re.findall(r"(\w+) (\d+)", asked)}
    return autopar.plan(name, int(devices), batch_size=int(batch), hardware=machine, precision="bf16-params", **given)


def decision_of(plan: autopar.Plan) -> str:
    """``dp 8, ZeRO-1``: the sizes of the mesh above 1, the ZeRO stage, and whether ranks have several stages."""
    sizes = {axis: getattr(plan.mesh, axis) for axis in ("pp", "tp", "dp")}
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size > 1] or ["one device"]
    parts += [f"ZeRO-{plan.zero}"] if plan.zero else []
    return ", ".join([*parts, *(["interleaved"] if plan.chunks > 1 else [])])


def test_the_table_is_read() -> None:
    assert len(ROWS) >= 11


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} on {row[1]} {row[2]}")
def test_the_plan_is_the_expert_s(row: tuple[str, ...]) -> None:
    *question, decision, least, most = row
    plan = planned(*question)
    assert decision_of(plan) == decision
    assert float(least) <= 1e3 * plan.prediction.step_seconds <= float(most)


@pytest.mark.full
def test_7b_parameters_do_not_fit_two_consumer_gpus() -> None:
    with pytest.raises(InfeasibleError, match=r"stage 0 needs 5\d\.\d GiB"):
        planned("vit_7b_patch16_dinov3", "2", "rtx4090-pcie", "16", "")
