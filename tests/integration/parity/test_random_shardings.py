"""Plans that nobody would make: operations split at random and weights held in random layouts still give one device's
numbers, because whatever does not fit is converted."""

from __future__ import annotations

import random

import pytest
import torch
from support.effort import only
from support.handmade import plan_by_hand
from support.mesh_models import MODELS
from support.random_plans import TP, random_labels, random_layouts

from autopar.tools.parity.compare import compare
from autopar.trace.call import as_call
from autopar.trace.trace import trace


@pytest.mark.parametrize("name", only(["vit"], ["vit", "swin", "resnet18"]))
def test_any_sharding_equals_one_device(name: str) -> None:
    torch.manual_seed(0)
    rng = random.Random(name)
    model, x = MODELS[name].make().double().train(), MODELS[name].x()[:8].double()
    call = as_call(model, x).first(4)
    graph = trace(model, call.args, call.kwargs)
    labels, layouts = random_labels(graph, rng), random_layouts(graph, rng)
    assert sum(map(bool, labels.values())) > 10 and len(layouts) > 10
    plan = plan_by_hand(model, x, 2, [], tp=TP, strategies=labels, shardings=layouts, precision="fp64")
    parity = compare(model, x, devices=TP, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]
