"""Measured training steps of one GPU (docs/benchmarks/one-gpu-steps.json), and what the planner predicts for them.

``PYTHONPATH=tests python -m support.measured_steps`` prints the table of docs/benchmarks.md; it needs no GPU.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import autopar
from autopar.api.model_source import ModelSource, default_input_shape

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "one-gpu-steps.json"


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

    def __str__(self) -> str:
        size = f" at {self.kwargs['img_size']} px" if "img_size" in self.kwargs else ""
        parts = f" in {self.microbatches}" if self.microbatches > 1 else ""
        recomputing = ", recomputing" if self.recompute == "all" else ""
        return f"{self.model}{size}, {self.batch}{parts}, {self.precision}{recomputing}, {self.hardware}"

    @property
    def predicted_milliseconds(self) -> float:
        """The step of the plan that `autopar.plan` makes with the prices of the cost model."""
        model = ModelSource(self.model, self.kwargs).build("meta")
        images = torch.empty(default_input_shape(model, self.batch), device="meta")
        if self.channels_last:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        plan = autopar.plan(
            model, devices=1, example_inputs=images, hardware=self.hardware, precision=self.precision,
            microbatches=self.microbatches, recompute=self.recompute, cost="analytic",
        )  # fmt: skip
        return 1e3 * plan.prediction.step_seconds


def measured_steps() -> list[MeasuredStep]:
    """All measured steps of the file."""
    return [MeasuredStep(**row) for row in json.loads(FILE.read_text())]


def main() -> None:
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
