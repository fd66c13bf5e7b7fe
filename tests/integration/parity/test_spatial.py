"""One picture whose height or width is split over ranks: outputs, loss, gradients and weights are one device's."""

from __future__ import annotations

import pytest
import torch
from support.effort import only
from support.handmade import plan_by_hand
from support.spatial import MODELS, spatial_labels

from autopar.tools.parity.compare import compare
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model

CELLS = [(name, letter, ranks) for name in MODELS for letter in ("y0", "y1") for ranks in (2, 4)]
KEPT = [("unet", "y0", 4), ("resnet50", "y0", 4), ("convnext", "y1", 2), ("segformer", "y0", 4)]


@pytest.mark.parametrize(("name", "letter", "ranks"), only(KEPT, CELLS))
def test_a_split_picture_equals_one_device(name: str, letter: str, ranks: int) -> None:
    torch.manual_seed(0)
    case = MODELS[name]
    model = case.make().double().train()
    sides = (case.height, case.width) if letter == "y0" else (case.width, case.height)
    x = torch.randn(1, 3, *sides, dtype=torch.float64)
    labels = spatial_labels(lower_model(model, as_call(model, x), "train", "", "fp64"), ranks, letter)
    assert len(labels) > 5
    plan = plan_by_hand(model, x, 1, [], tp=ranks, strategies=labels, precision="fp64")
    parity = compare(model, x, devices=ranks, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]
