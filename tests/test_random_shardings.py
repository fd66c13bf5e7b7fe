"""Plans that nobody would make: operations split at random and weights held in random layouts still give one device's
numbers, because whatever does not fit is converted."""

from __future__ import annotations

import random

import pytest
import torch
from handmade import plan_by_hand
from mesh_models import MODELS

from autopar.batching import as_call
from autopar.ir import Graph
from autopar.parity import compare
from autopar.rules import rule_of, strategies
from autopar.trace import trace

TP = 2


def random_labels(graph: Graph, rng: random.Random) -> dict[str, str]:
    """A strategy for most operations, in whole or by a part of a factor."""
    labels = {}
    for op in graph.ops:
        rule = rule_of(op, graph.shapes.__getitem__)
        if rule is not None and rng.random() < 0.7:
            labels[op.name] = rng.choice(strategies(rule, TP, dict.fromkeys(rule.free, (2, 3)))).label
    return labels


def random_layouts(graph: Graph, rng: random.Random) -> dict[str, str]:
    """A layout for most weights; statistics that are updated in place stay where their operation finds them."""
    updated = {name for op in graph.ops for name in op.mutates}
    layouts = {}
    for weight in graph.weights:
        if weight.kind == "constant" or weight.name in updated or rng.random() < 0.4:
            continue
        splits = [
            (dim, parts) for dim, size in enumerate(weight.shape) for parts in (1, 2, 3) if size % (parts * TP) == 0
        ]
        options = ["tp:gradient", *(f"tp:{dim}" + (f"x{parts}" if parts > 1 else "") for dim, parts in splits)]
        layouts[weight.name] = rng.choice(options)
    return layouts


@pytest.mark.parametrize("name", ["vit", "swin", "resnet18"])
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
