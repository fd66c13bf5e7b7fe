"""One picture whose height or width is split over ranks: outputs, loss, gradients and weights are one device's."""

from __future__ import annotations

import functools

import pytest
import torch
from support.effort import only
from support.handmade import plan_by_hand
from support.spatial import MODELS, spatial_labels
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


def peak_bytes(model: nn.Module, x: Tensor, y: Tensor, plan: Plan) -> int:
    """Most bytes of tensors that a training step makes on a rank: activations, and gradients on their way."""
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    with autopar.parallelize(
        model, plan.mesh.devices, example_inputs=(x,), plan=plan, backend="gloo", compile=False, optimizer=optimizer
    ) as pm:
        pm.train_step(x, y)
        return max(pm.measure_memory(x, y).values())


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_each_of_four_ranks_holds_a_quarter_of_the_activations(name: str) -> None:
    model, case = MODELS[name].make().train(), MODELS[name]
    x = torch.randn(1, 3, 1024, 1024)
    y = torch.zeros_like(model(x)[:, 0], dtype=torch.int64)
    whole, part = (peak_bytes(model, x, y, spatial_plan(model, x, ranks)) for ranks in (1, 4))
    assert 0.9 / 4 < part / whole < 1.1 / 4, f"{part / whole:.3f}"
