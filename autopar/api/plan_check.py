"""Checks that a plan fits the graph that it is used with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import PlanError, suggest
from autopar.ir.graph import Graph, names_layout_copy
from autopar.ir.layout import REPLICATED, TP, Layout, broadcast_layout, look_up, pattern_of, split_layout
from autopar.ir.plan import Plan
from autopar.sharding.lookup import rule_of
from autopar.sharding.rule import strategy


def weight_layouts(plan: Plan, graph: Graph) -> Mapping[str, Layout]:
    """Layout in which the ranks hold each weight.

    Raises:
        PlanError: the plan names a weight that the model lacks, or a layout that a weight cannot have.
    """
    check_table_names("shardings", plan.shardings, [w.name for w in graph.weights])
    storage: dict[str, Layout] = {}
    for weight in graph.weights:
        text = look_up(plan.shardings, weight.name)
        layout = Layout.parse(text) if text is not None else REPLICATED
        if not storable(layout) or not layout.fits(weight.shape, {TP: plan.mesh.tp}):
            raise PlanError(
                f"Plan field shardings.{weight.name}: it has shape {list(weight.shape)} and cannot lie as {text!r} on "
                f"{plan.mesh.tp} ranks. Split one dim whose size the ranks divide ({TP}:DIM or {TP}:DIMxPARTS), or any "
                f"dim in units ({TP}:DIM@UNIT), write {broadcast_layout()} or {REPLICATED}, or leave it out."
            )
        if weight.kind == "constant" and layout != REPLICATED:
            raise PlanError(
                f"Plan field shardings.{weight.name}: it is a constant of the trace, which is replicated. Leave it out."
            )
        storage[weight.name] = layout
    return storage


def storable(layout: Layout) -> bool:
    """Whether weights can have a layout: replicated, split once over the tensor axis, or with a partial gradient."""
    splits = (split_layout(s.dim, s.outer, unit=s.unit) for s in layout.splits)
    return layout in (REPLICATED, broadcast_layout(), *splits)


def check_strategies(plan: Plan, graph: Graph) -> None:
    """Refuse strategies that the graph's operations do not have.

    Raises:
        PlanError: names the field and the factors of the operation.
    """
    check_table_names("strategies", plan.strategies, [op.name for op in graph.ops])
    for op in graph.ops:
        label = look_up(plan.strategies, op.name)
        if not label:
            continue
        rule = rule_of(op, graph.shapes.__getitem__)
        if rule is None or strategy(rule, label, plan.mesh.tp) is None:
            free = {letter: rule.sizes[letter] for letter in rule.free} if rule is not None else {}
            raise PlanError(
                f"Plan field strategies: {op.name} ({op.target}) cannot run split by {label!r} on {plan.mesh.tp} "
                f"ranks. Its factors and their sizes: {free or 'none'}."
            )


def check_table_names(field: str, table: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse entries of a plan's table that match no name in the model, but for copies that this batch does without."""
    known = {*names, *map(pattern_of, names)}
    for name in table:
        if name not in known and not names_layout_copy(name):
            raise PlanError(f"Plan field {field}: the model has no {name!r}.{suggest(name, sorted(known))}")
