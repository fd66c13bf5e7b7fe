"""Predicted steps against measured ones: the shipped cost models, one GPU, no operation timed."""

from __future__ import annotations

import pytest
from support.measured_steps import MeasuredStep, measured_steps

# Traced and planned in 2 to 4 s each; together they have every term of the prices.
FAST = ("mixer_b16_224, 256, bf16-params, h100-nvlink", "vit_base_patch16_224 at 32 px, 256, bf16, h100-nvlink")
MAX_ERROR = 0.08
STEPS = [pytest.param(s, id=str(s), marks=[] if str(s) in FAST else pytest.mark.full) for s in measured_steps()]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_takes_what_was_predicted(step: MeasuredStep) -> None:
    assert step.predicted_milliseconds == pytest.approx(step.milliseconds, rel=MAX_ERROR)
