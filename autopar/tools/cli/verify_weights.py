"""Proof that trained weights have the same accuracy in the unmodified model as in the parallel one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer

from autopar.api.model import ParallelModel
from autopar.api.model_source import ModelSource
from autopar.errors import TrainingError
from autopar.ir.plan import Plan
from autopar.ir.units import percent, plural
from autopar.trace.passes.bf16_params import cast_leaf, params_to_lower
from autopar.trace.passes.precision import low_param_dtype
from autopar.train import Data, Evaluation, evaluate, evaluate_alone, evaluation_loader, first, load_weights

MAX_IMAGES = 1024  # one process would take long for many more
# Allowed share of images with another result: their two best classes are so close that the order of sums decides.
ALLOWED = {"fp64": 0.0, "fp32": 0.002, "bf16": 0.02, "fp16": 0.01, "bf16-params": 0.02}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ReferenceScore:
    """Score of the parallel model on the first `MAX_IMAGES` test images."""

    data: Data
    batch_size: int
    scored: Evaluation

    @staticmethod
    def of(pm: ParallelModel, data: Data, batch_size: int, channels_last: bool) -> ReferenceScore:
        """Evaluate the parallel model. A collective call: all ranks of torchrun make it."""
        some = replace(data, test=first(data.test, MAX_IMAGES))
        images = evaluation_loader(some, batch_size, pm, channels_last=channels_last)
        return ReferenceScore(some, batch_size, evaluate(pm, images.epoch(1)))


@dataclass(frozen=True)
class VerifiedWeights:
    """A file of weights, and accuracies on the first `MAX_IMAGES` test images, if they were compared.

    ``accuracy`` is the parallel model's, ``unmodified_accuracy`` that of the unmodified model with the weights.
    """

    file: Path
    accuracy: float | None = None
    unmodified_accuracy: float | None = None
    images: int | None = None


def verify(
    proof: ReferenceScore, source: ModelSource, weights: Path, plan: Plan, device: str, title: str
) -> VerifiedWeights:
    """Load the weights into the unmodified model in this process and compare its accuracy with the parallel model's.

    Prints both accuracies.

    Args:
        title: printed before the figures.
    Raises:
        TrainingError: the accuracies differ by more than `ALLOWED`.
    """
    model = load_weights(source.build("cpu"), weights).to(device)
    dtype, low = AUTOCAST.get(plan.precision), low_param_dtype(plan.precision)
    for parameter in params_to_lower(model).values() if low is not None else ():
        parameter.data = parameter.data.to(low)

    def alone(x: torch.Tensor) -> Any:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return model(cast_leaf(x.to(device), low) if low is not None else x.to(device))

    images = evaluation_loader(proof.data, proof.batch_size, channels_last=source.channels_last)
    scored = evaluate_alone(alone, images.epoch(1))
    total = scored.samples
    typer.echo(f"{title:<14} {percent(proof.scored.accuracy, 2)}  on {plural(plan.mesh.devices, 'device')}")
    typer.echo(
        f"{'':<14} {percent(scored.accuracy, 2)}  with {weights.name} in the unmodified {source.name}, one process "
        f"({scored.right} of {plural(total, 'image')})"
    )
    if abs(scored.right - proof.scored.right) > ALLOWED[plan.precision] * total:
        raise TrainingError(
            f"The unmodified {source.name} gets {scored.right} of {total} test images right with {weights}, "
            f"the parallel model got {proof.scored.right}. Run `autopar check` on it and report that."
        )
    return VerifiedWeights(weights, proof.scored.accuracy, scored.accuracy, total)
