"""Plans to explain: of small models for GPUs, and pipelines whose times a test gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import autopar
from autopar.api.model_source import ModelSource
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.plan_parts import (
    HardwareInfo,
    InputInfo,
    Message,
    ModelInfo,
    Prediction,
    SolverInfo,
    Stage,
    StageMemory,
)
from autopar.tools.explain.breakdown import breakdown_of
from support.cli import invoke

GIB = 2**30
VIT = ModelSource(
    "vit_tiny_patch16_224",
    {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 10},
    (16, 3, 32, 32),
)
RESNET = ModelSource("resnet18", {"num_classes": 10}, (16, 3, 32, 32))
MIXER = ModelSource("mixer_s32_224", {"img_size": 64, "num_classes": 10}, (16, 3, 64, 64))


@cache
def planned(source_name: str, devices: int, *given: tuple[str, Any]) -> Plan:
    """Plan of one of the models above for GPUs, under 1F1B by default; ``given`` are constraints as (name, value)."""
    source = next(s for s in (VIT, RESNET, MIXER) if s.name == source_name)
    return autopar.plan(source, devices, **{"hardware": "h200-nvlink", "schedule": "1f1b", **dict(given)})


def by_hand(
    times: Sequence[tuple[float, float]],
    microbatches: int = 8,
    hop_seconds: float = 0.0,
    peak_gib: float = 1.0,
    **changes: Any,
) -> Plan:
    """Pipeline of stages with these forward and backward seconds, and the step time that follows from them."""
    pp = len(times)
    stages = tuple(
        Stage(f"blocks.{i}.first.linear", f"blocks.{i}.last.linear", (i,), 7, f, b, 0, int(peak_gib * GIB),
              memory=StageMemory(int(peak_gib * GIB / 2), int(peak_gib * GIB / 8), int(peak_gib * GIB / 4)))
        for i, (f, b) in enumerate(times)
    )  # fmt: skip
    hops = [(s, s + 1) for s in range(pp - 1)]
    plan = Plan(
        model=ModelInfo("m", "0123", 7, (InputInfo("x", (64, 3), "float32"),)),
        batch=64,
        mesh=Mesh(pp),
        schedule="1f1b",
        microbatches=microbatches,
        stages=stages,
        prediction=Prediction(1.0, 64.0, 0.0, (int(peak_gib * GIB),) * pp, 0.1),
        solver=SolverInfo("by hand", "by hand", 0.0, 0.0),
        hardware=HardwareInfo("box", "GPU", "wire", 10 * GIB),
        messages=tuple(Message(a, b, 2**20, hop_seconds) for s, d in hops for a, b in ((s, d), (d, s))),
    )
    plan = replace(plan, **changes)
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=breakdown_of(plan).step_seconds))
    plan.validate()
    return plan


def saved(plan: Plan, name: str = "plan.json") -> str:
    """Name of the file to which the plan is saved in the working directory."""
    plan.save(name)
    return name


def reported(*args: str) -> dict[str, Any]:
    """Output of ``autopar explain --json``, parsed."""
    code, out, error = invoke("explain", *args, "--json")
    assert code == 0, error
    return json.loads(out)
