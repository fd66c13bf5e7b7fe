"""Measured training steps (docs/benchmarks/*-steps.json), what the planner predicts for them, and its error bands.

``PYTHONPATH=tests python -m support.measured_steps`` prints the table of one GPU of docs/benchmarks.md, and with
``bands`` that of error bands with families left out; it needs no GPU.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, hypot, sqrt
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import autopar
from autopar.api.model_source import ModelSource, default_input_shape
from autopar.api.planning.error_band import parts_of, total_error
from autopar.cost.hardware.load import cost_model_dir, load_hardware
from autopar.cost.hardware.worse import FUSION_ERROR, largest_error
from autopar.ir.hardware import StepCalibration
from autopar.ir.plan import Plan

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "plain ViTs": ("vit", "deit", "eva", "beit", "cait", "crossvit", "volo", "xcit"),
    "mixers": ("mixer", "gmixer", "poolformer"),
    "convolutional nets": ("resnet", "resnext", "wide_resnet", "regnet", "convnext", "efficientnet"),
    "windowed and hierarchical transformers": (
        *("coatnet", "maxvit", "swin", "hiera", "davit", "twins", "pit", "mvit", "focalnet"),
    ),
}
machine = cache(load_hardware)
COVERAGE = 0.9  # share of steps that are to lie within their bands
MAX_ERROR = 0.08  # of a step of one GPU
KNOWN_ERRORS = {"maxvit_tiny_tf_224": 0.09, "regnety_016": 0.19, "vit_base_patch16_224": 0.1}  # docs/benchmarks.md


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step.

    Args:
        use: "kernels" or "step" if constants were fitted to its kernels or to the step; "seen" if a term without a
            constant of its own was chosen with the step in view; empty for a step that was held out.
    """

    model: str
    batch: int
    precision: str
    hardware: str
    milliseconds: float
    microbatches: int = 1
    recompute: Literal["none", "all"] = "none"
    channels_last: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    use: Literal["", "kernels", "step", "seen"] = ""
    devices: int = 1
    constraints: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f" at {self.kwargs['img_size']} px" if "img_size" in self.kwargs else ""
        parts = f" in {self.microbatches}" if self.microbatches > 1 else ""
        recomputing = ", recomputing" if self.recompute == "all" else ""
        return f"{self.model}{size}, {self.batch}{parts}, {self.precision}{recomputing}, {self.hardware}"

    @property
    def predicted_milliseconds(self) -> float:
        """The step of the plan that `autopar.plan` makes with the prices of the cost model."""
        return 1e3 * self.plan(self.hardware).prediction.step_seconds

    def check(self, predicted_milliseconds: float) -> None:
        """Raise an AssertionError if a prediction is further off than it may be."""
        allowed = KNOWN_ERRORS.get(self.model, MAX_ERROR)
        error = predicted_milliseconds / self.milliseconds - 1
        assert abs(error) <= allowed, f"{self}: {error:.3f}, {allowed} is allowed"

    @property
    def family(self) -> str:
        """The family of the model, of `FAMILIES`."""
        return next(name for name, starts in FAMILIES.items() if self.model.startswith(starts))

    def plan(self, hardware: str) -> Plan:
        """The plan that was run, with the prices of a cost model."""
        model = ModelSource(self.model, self.kwargs).build("meta")
        images = torch.empty(default_input_shape(model, self.batch), device="meta")
        if self.channels_last:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        asked = {"microbatches": self.microbatches, "recompute": self.recompute} if self.devices == 1 else {}
        return autopar.plan(
            model, devices=self.devices, example_inputs=images, hardware=hardware, precision=self.precision,
            cost="analytic", **asked, **self.constraints,
        )  # fmt: skip


@dataclass(frozen=True)
class PredictedStep:
    """A measured step with its prediction.

    Args:
        milliseconds: predicted.
        errors: of the parts of the step, by the numbers of the cost model alone.
    """

    step: MeasuredStep
    milliseconds: float
    errors: Mapping[str, float]

    @property
    def error(self) -> float:
        """Error of the step, relative to the prediction."""
        return abs(self.step.milliseconds / self.milliseconds - 1)

    def with_fusion_error(self, fusion_error: float) -> Mapping[str, float]:
        """The errors of parts with another error of fused memory kernels."""
        hardware = machine(self.step.hardware)
        of_numbers = largest_error(hardware, "memory.bandwidth", "memory.efficiency")
        ratio = max(fusion_error, of_numbers) / max(FUSION_ERROR, of_numbers)
        return {name: error * (ratio if name == "memory" else 1) for name, error in self.errors.items()}

    @property
    def needed_fusion_error(self) -> float:
        """The error of fused memory kernels with which the step is just within its band."""
        others = hypot(*(error for name, error in self.errors.items() if name != "memory"))
        missing = sqrt(max(0.0, self.error**2 - others**2))
        return missing / self.with_fusion_error(1.0)["memory"]

    def band(self, fusion_error: float, calibration: StepCalibration | None) -> float:
        """Relative error that a plan would print."""
        hardware = machine(self.step.hardware)
        return total_error(parts_of(self.with_fusion_error(fusion_error), hardware, calibration, "analytic"))


def measured_steps(several_devices: bool = False) -> list[MeasuredStep]:
    """All measured steps of one device, or of several."""
    file = FOLDER / f"{'several-device' if several_devices else 'one-gpu'}-steps.json"
    return [MeasuredStep(**row) for row in json.loads(file.read_text())]


def predicted_steps() -> list[PredictedStep]:
    """All measured steps with their predictions, in about five minutes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for step in [*measured_steps(), *measured_steps(several_devices=True)]:
            file = Path(folder) / f"{step.hardware}.toml"
            shipped = (cost_model_dir() / file.name).read_text()
            file.write_text(re.sub(r"^\[calibration\]\n(?:[^\[\n].*\n)*", "", shipped, flags=re.MULTILINE))
            prediction = step.plan(str(file)).prediction
            errors = {part.name: part.error for part in prediction.parts}
            found.append(PredictedStep(step, 1e3 * prediction.step_seconds, errors))
    return found


def fusion_error(steps: Sequence[PredictedStep]) -> float:
    """The error of fused memory kernels with which nine of ten steps of every family are within their bands: the next
    model may be of another family, which may be as far off as the worst of these.

    Nine of ten of n + 1 steps, the next one counted as outside: the quantile of split conformal prediction (Lei et al.
    2018, equation 2).
    """
    needed: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        needed[step.step.family].append(step.needed_fusion_error)
    return max(sorted(errors)[min(len(errors), ceil(COVERAGE * (len(errors) + 1))) - 1] for errors in needed.values())


def calibration(steps: Sequence[PredictedStep], name: str) -> StepCalibration | None:
    """``[calibration]`` of a machine from these steps of at most two devices; None if its file has none."""
    own = [step for step in steps if step.step.hardware == name and step.step.devices <= 2]
    if not own or not machine(name).calibration:
        return None
    covers = dict.fromkeys(part for step in own for part in step.errors)
    return StepCalibration(max(step.error for step in own), tuple(covers))


def bands_without(steps: Sequence[PredictedStep], family: str) -> list[tuple[PredictedStep, float]]:
    """The steps of a family with the bands that the steps of all other families give them."""
    others = [step for step in steps if step.step.family != family]
    error = fusion_error(others)
    left_out = [step for step in steps if step.step.family == family]
    return [(step, step.band(error, calibration(others, step.step.hardware))) for step in left_out]


def print_bands() -> None:
    steps = predicted_steps()
    print("| left out | within their bands | outside |\n|---|---|---|")
    inside = 0
    for family in FAMILIES:
        banded = bands_without(steps, family)
        outside = [f"{s.step} ({s.error:.0%}, band {band:.0%})" for s, band in banded if s.error > band]
        inside += len(banded) - len(outside)
        print(f"| {family} | {len(banded) - len(outside)} of {len(banded)} | {'; '.join(outside)} |")
    print(f"| all | {inside} of {len(steps)}, {inside / len(steps):.0%} | |")
    print(f"error of fused memory kernels, by all: {fusion_error(steps):.3f}", file=sys.stderr)


def main() -> None:
    if sys.argv[1:] == ["bands"]:
        print_bands()
        return
    errors: defaultdict[str, list[float]] = defaultdict(list)
    print("| step | measured | predicted | error | use |\n|---|---|---|---|---|")
    for step in measured_steps():
        predicted = step.predicted_milliseconds
        error = predicted / step.milliseconds - 1
        errors[step.use or "held out"].append(abs(error))
        print(f"| {step} | {step.milliseconds:.4g} ms | {predicted:.4g} | {100 * error:+.1f} % | {step.use} |")
    for use, values in errors.items():
        print(f"{use}: median {median(values):.1%}, worst {max(values):.1%} of {len(values)}", file=sys.stderr)


if __name__ == "__main__":
    main()
