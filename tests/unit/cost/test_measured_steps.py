"""Predicted steps against measured ones: the shipped cost models, one GPU, no operation timed.

All steps are predicted in tests/unit/api/test_error_band.py.
"""

from __future__ import annotations

import pytest
from support.measured_steps import MeasuredStep, measured_steps

# Traced and planned in 2 to 4 s each; together they have every term of the prices.
FAST = ("mixer_b16_224, 256, bf16-params, h100-nvlink", "vit_base_patch16_224 at 32 px, 256, bf16, h100-nvlink")


@pytest.mark.parametrize("step", [step for step in measured_steps() if str(step) in FAST], ids=str)
def test_a_step_takes_what_was_predicted(step: MeasuredStep) -> None:
    step.check(step.predicted_milliseconds)
