"""Description of a run that a tracker gets once: the caller's settings, the plan, and versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar import __version__
from autopar.ir.plan import Plan


def description(plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's settings under their names, ``plan/…`` and ``versions/…``; settings that are None are left out."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in config.items()}
    return {name: value for name, value in given.items() if value is not None} | of_plan(plan) | versions()


def of_plan(plan: Plan) -> dict[str, Any]:
    """What a plan decides and predicts, in numbers and words that runs are compared by."""
    prediction = plan.prediction
    return {
        "plan/model": plan.model.name,
        "plan/parameters": plan.model.num_params,
        "plan/batch": plan.batch,
        "plan/devices": plan.mesh.devices,
        "plan/device": plan.hardware.device,
        "plan/mesh": str(plan.mesh),
        "plan/pp": plan.mesh.pp,
        "plan/tp": plan.mesh.tp,
        "plan/dp": plan.mesh.dp,
        "plan/zero": plan.zero,
        "plan/schedule": plan.schedule,
        "plan/chunks": plan.chunks,
        "plan/microbatches": plan.microbatches,
        "plan/microbatch_size": plan.microbatch_size,
        "plan/precision": plan.precision,
        "plan/recompute": ", ".join(stage.recompute_text for stage in plan.stages),
        "plan/predicted_step_seconds": prediction.step_seconds,
        "plan/predicted_samples_per_second": prediction.samples_per_second,
        "plan/predicted_bubble_fraction": prediction.bubble_fraction,
        "plan/predicted_peak_bytes": max(prediction.peak_bytes),
    }


def versions() -> dict[str, str]:
    """Versions of the software that a run's speed and numbers depend on."""
    found = {"autopar": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return {f"versions/{name}": version for name, version in found.items()}
