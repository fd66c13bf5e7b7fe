"""One picture whose height or width is split over ranks: outputs, loss, gradients and weights are one device's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from support.effort import only
from support.handmade import plan_by_hand
from support.spatial import LARGE_MODELS, MODELS, spatial_labels
from torch import Tensor, nn

import autopar
from autopar.ir.plan import Plan
from autopar.tools.parity.compare import compare
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

CELLS = [(name, letter, ranks) for name in MODELS for letter in ("y0", "y1") for ranks in (2, 4)]
KEPT = [("unet", "y0", 4), ("resnet50", "y0", 4), ("convnext", "y1", 2), ("segformer", "y0", 4)]


def spatial_plan(model: nn.Module, x: Tensor, ranks: int, letter: str = "y0") -> Plan:
    """The plan that splits a dim of the picture over ``ranks``, or runs the model on one device."""
    precision = "fp64" if x.dtype == torch.float64 else "fp32"
    labels = spatial_labels(lower_model(model, as_call(model, x), "train", "", precision), ranks, letter)
    assert len(labels) > 5
    strategies = labels if ranks > 1 else {}
    return plan_by_hand(model, x, 1, [], tp=ranks, strategies=strategies, precision=precision)


@pytest.mark.parametrize(("name", "letter", "ranks"), only(KEPT, CELLS))
def test_a_split_picture_equals_one_device(name: str, letter: str, ranks: int) -> None:
    torch.manual_seed(0)
    case = MODELS[name]
    model = case.make().double().train()
    sides = (case.height, case.width) if letter == "y0" else (case.width, case.height)
    x = torch.randn(1, 3, *sides, dtype=torch.float64)
    plan = spatial_plan(model, x, ranks, letter)
    parity = compare(model, x, devices=ranks, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]


@dataclass(frozen=True)
class Measured:
    """Gradients of a training step, and most bytes of tensors that the next one makes on a rank: activations, and
    gradients on their way."""

    gradients: Mapping[str, Tensor]
    peak_bytes: int


def measured(model: nn.Module, x: Tensor, y: Tensor, plan: Plan) -> Measured:
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    with autopar.parallelize(
        model, plan.mesh.devices, example_inputs=(x,), plan=plan, backend="gloo", compile=False, optimizer=optimizer
    ) as pm:
        pm.forward_backward(x, y)
        gradients = pm.gradients()
        pm.optimizer_step()
        return Measured(gradients, max(pm.measure_memory(x, y).values()))


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE_MODELS)
def test_each_of_four_ranks_holds_a_quarter_of_a_large_picture(name: str) -> None:
    torch.manual_seed(0)
    side = 1024 if name == "segformer" else 2048  # of the others weights take too large a part of 1,024
    model, x = LARGE_MODELS[name]().train(), torch.randn(1, 3, side, side)
    with torch.device("meta"):
        made = LARGE_MODELS[name]()(x.to("meta"))
    y = torch.randint(2, (1, *made.shape[2:]))
    whole, part = (measured(model, x, y, spatial_plan(model, x, ranks)) for ranks in (1, 4))
    largest = max(gradient.norm() for gradient in whole.gradients.values())
    for weight, gradient in whole.gradients.items():  # those of biases before norms are noise around 0
        error = (part.gradients[weight] - gradient).norm() / gradient.norm().clamp(min=1e-3 * largest)
        # Sums over millions of pixels in float32, in another order; ReLU and max-pooling have kinks.
        assert error < 1e-2, f"gradient of {weight} is {error:.1e} off"
    assert part.peak_bytes / whole.peak_bytes == pytest.approx(1 / 4, rel=0.1)
