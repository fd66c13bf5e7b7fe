"""Predicted steps against measured ones: the shipped cost models, one GPU, no operation timed."""

from __future__ import annotations

import pytest
from support.measured_steps import MeasuredStep, measured_steps

# Traced and planned in 2 to 4 s each; together they have every term of the prices.
FAST = ("mixer_b16_224, 256, bf16-params, h100-nvlink", "vit_base_patch16_224 at 32 px, 256, bf16, h100-nvlink")
MAX_ERROR = 0.08
# Larger errors, explained in docs/benchmarks.md.
KNOWN_ERRORS = {"maxvit_tiny_tf_224": 0.09, "regnety_016": 0.19, "vit_base_patch16_224": 0.1}
STEPS = [pytest.param(s, id=str(s), marks=[] if str(s) in FAST else pytest.mark.full) for s in measured_steps()]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_takes_what_was_predicted(step: MeasuredStep) -> None:
    error = KNOWN_ERRORS.get(step.model, MAX_ERROR)
    assert step.predicted_milliseconds == pytest.approx(step.milliseconds, rel=error)
