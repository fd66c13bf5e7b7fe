"""Error bands of predicted steps: what narrows them, and how many measured steps lie within theirs."""

from __future__ import annotations

import re
from math import sqrt
from pathlib import Path

import pytest
from support.measured_steps import (
    COVERAGE,
    FAMILIES,
    PredictedStep,
    bands_without,
    calibration,
    fusion_error,
    predicted_steps,
)

import autopar
from autopar.api.planning.error_band import TIMED_OPS_ERROR, parts_of, total_error
from autopar.cost.hardware.load import cost_model_dir, load_hardware
from autopar.cost.hardware.worse import FUSION_ERROR
from autopar.ir.hardware import StepCalibration
from autopar.ir.plan import Plan

H200 = load_hardware("h200-nvlink")
ERRORS = {"matmul bfloat16": 0.03, "depthwise bfloat16": 0.2, "memory": 0.04, "links": 0.1, "network": 0.3}
COVERED = ("matmul bfloat16", "memory")


def test_measured_steps_narrow_the_compute_that_they_cover() -> None:
    free = parts_of(ERRORS, H200, None, "analytic")
    assert {part.name: (part.error, part.basis) for part in free} == {
        name: (error, "assumed" if name == "network" else "measured") for name, error in ERRORS.items()
    }
    narrowed = {part.name: part for part in parts_of(ERRORS, H200, StepCalibration(0.01, COVERED), "analytic")}
    assert total_error([narrowed[name] for name in COVERED]) == pytest.approx(0.01)
    assert all(narrowed[name].basis == "steps" for name in COVERED)
    assert {name: narrowed[name].error for name in ERRORS if name not in COVERED} == {
        "depthwise bfloat16": 0.2, "links": 0.1, "network": 0.3
    }  # fmt: skip
    assert parts_of(ERRORS, H200, StepCalibration(0.06, COVERED), "analytic") == free, "it is narrower already"


def test_operations_that_were_timed_have_the_error_of_timing() -> None:
    compute = [name for name in ERRORS if name not in ("links", "network")]
    for measured, error in ((None, TIMED_OPS_ERROR), (StepCalibration(0.06, ()), 0.06)):
        parts = {part.name: part for part in parts_of(ERRORS, H200, measured, "measured")}
        assert total_error([parts[name] for name in compute]) == pytest.approx(error)
        assert (parts["links"].error, parts["network"].error) == (0.1, 0.3)


def planned(hardware: str, devices: int) -> Plan:
    return autopar.plan(
        "vit_tiny_patch16_224", devices=devices, batch_size=64 * devices, hardware=hardware, precision="bf16-params",
        pp=1, tp=1, cost="analytic",
    )  # fmt: skip


def test_a_band_is_of_what_the_plan_has(tmp_path: Path) -> None:
    """No depthwise convolution and, on one node, no network: their errors do not count."""
    text = (cost_model_dir() / "h200-nvlink.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(r"(\[network\](?:.|\n)*?bandwidth = .*?error = )0\.3", r"\g<1>3.0", text))
    for devices in (8, 16):
        shipped, other = (planned(hardware, devices).prediction for hardware in ("h200-nvlink", str(path)))
        names = {part.name for part in shipped.parts}
        assert "depthwise bfloat16" not in names and {"matmul bfloat16", "memory", "links"} <= names
        assert ("network" in names) is (devices == 16)
        assert (other.error > 1.1 * shipped.error) is (devices == 16)


@pytest.fixture(scope="module")
def steps() -> list[PredictedStep]:
    return predicted_steps()


@pytest.mark.full
def test_steps_take_what_was_predicted(steps: list[PredictedStep]) -> None:
    for step in steps:
        if step.step.devices == 1:
            step.step.check(step.milliseconds)


@pytest.mark.full
def test_nine_of_ten_measured_steps_are_within_their_bands(steps: list[PredictedStep]) -> None:
    """Also steps of families that the bands know nothing of, but for one standard deviation of so many."""
    assert fusion_error(steps) <= FUSION_ERROR
    shipped = [(step, step.band(FUSION_ERROR, calibration(steps, step.step.hardware))) for step in steps]
    left_out = [pair for family in FAMILIES for pair in bands_without(steps, family)]
    for banded, least in ((shipped, COVERAGE), (left_out, COVERAGE - sqrt(COVERAGE * (1 - COVERAGE) / len(steps)))):
        outside = [f"{step.step}: {step.error:.3f} > {band:.3f}" for step, band in banded if step.error > band]
        assert len(banded) == len(steps)
        assert len(outside) <= (1 - least) * len(steps), outside
