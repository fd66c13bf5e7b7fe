"""Steps of plans that ran on 4 × NVIDIA H200 (docs/benchmarks.md), of which no constant was fitted to any."""

from __future__ import annotations

import pytest
from support.measured_steps import MeasuredStep, measured_steps

import autopar

MAX_ERROR = 0.07
STEPS = [s for s in measured_steps(several_devices=True) if (s.devices, s.hardware) == (4, "h200-nvlink")]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(s, id=f"{s} {s.constraints}", marks=() if s.model == "resnet50" else pytest.mark.full)
        for s in STEPS
    ],
)
def test_steps_of_four_gpus_are_predicted(step: MeasuredStep) -> None:
    assert step.predicted_milliseconds == pytest.approx(step.milliseconds, rel=MAX_ERROR)


@pytest.mark.full
@pytest.mark.parametrize("machine", ["h200-nvlink", "h100-nvlink"])
def test_vit_7b_is_replicated_on_4_gpus(machine: str) -> None:
    """Gradients are reduced under the backward, so that replicas cost little; measured: 350.9 ms on H200."""
    plan = autopar.plan(
        "vit_7b_patch16_dinov3", devices=4, batch_size=64, hardware=machine, precision="bf16-params", cost="analytic"
    )
    assert (plan.mesh.pp, plan.mesh.tp, plan.mesh.dp) == (1, 1, 4) and plan.zero
