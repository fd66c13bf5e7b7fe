"""Steps of plans that ran on 4 × NVIDIA H200 (docs/benchmarks.md), of which no constant was fitted to any."""

from __future__ import annotations

from typing import Any

import pytest

import autopar

ONE_STAGE: dict[str, Any] = {"pp": 1, "tp": 1, "dp": 4}
PIPELINE: dict[str, Any] = {"pp": 4, "tp": 1, "dp": 1}
MAX_ERROR = 0.07

STEPS = {
    "ViT-L, dp": ("vit_large_patch16_224", 512, "bf16-params", ONE_STAGE, 106.3),
    "ViT-L, interleaved": (
        "vit_large_patch16_224", 512, "bf16-params",
        PIPELINE | {"schedule": "interleaved-overlap", "chunks": 6, "microbatches": 8}, 118.9,
    ),
    "ViT-L, 1F1B": (
        "vit_large_patch16_224", 512, "bf16-params", PIPELINE | {"schedule": "1f1b", "microbatch_size": 16}, 134.4,
    ),
    "ViT-L, tp": ("vit_large_patch16_224", 512, "bf16-params", {"pp": 1, "tp": 4, "dp": 1}, 185.2),
    "ViT-giant, dp": ("vit_giant_patch14_224", 256, "bf16-params", ONE_STAGE, 232.7),
    "ResNet-50, dp": ("resnet50", 1024, "bf16", ONE_STAGE, 37.8),
    "vit_7b, dp": ("vit_7b_patch16_dinov3", 64, "bf16-params", ONE_STAGE, 350.9),
}  # fmt: skip


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row == "ResNet-50, dp" else pytest.mark.full) for row in STEPS]
)
def test_steps_of_four_gpus_are_predicted(row: str) -> None:
    model, batch, precision, constraints, milliseconds = STEPS[row]
    plan = autopar.plan(
        model, devices=4, batch_size=batch, hardware="h200-nvlink", precision=precision, cost="analytic", **constraints
    )
    assert plan.prediction.step_seconds * 1e3 == pytest.approx(milliseconds, rel=MAX_ERROR)


@pytest.mark.full
@pytest.mark.parametrize("machine", ["h200-nvlink", "h100-nvlink"])
def test_vit_7b_is_replicated_on_4_gpus(machine: str) -> None:
    """Gradients are reduced under the backward, so that replicas cost little; measured: 350.9 ms on H200."""
    plan = autopar.plan(
        "vit_7b_patch16_dinov3", devices=4, batch_size=64, hardware=machine, precision="bf16-params", cost="analytic"
    )
    assert (plan.mesh.pp, plan.mesh.tp, plan.mesh.dp) == (1, 1, 4) and plan.zero
