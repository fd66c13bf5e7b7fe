"""Strategies and weight layouts drawn at random, for plans that no planner would choose."""

from __future__ import annotations

import random

from autopar.ir.graph import Graph
from autopar.sharding.lookup import rule_of
from autopar.sharding.rule import strategies

TP = 2


def random_labels(graph: Graph, rng: random.Random) -> dict[str, str]:
    """Strategy labels of most operations, by a whole factor or by a part of one, ragged where sizes do not divide."""
    labels = {}
    for op in graph.ops:
        rule = rule_of(op, graph.shapes.__getitem__)
        if rule is not None and rng.random() < 0.7:
            labels[op.name] = rng.choice(strategies(rule, TP, dict.fromkeys(rule.free, (2, 3)), rule.free)).label
    return labels


def random_layouts(graph: Graph, rng: random.Random) -> dict[str, str]:
    """Layouts of most weights; statistics that are updated in place keep the layout of their operation."""
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
