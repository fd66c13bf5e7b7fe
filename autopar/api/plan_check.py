"""Checks that a plan fits the graph that it is used with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import PlanError, suggest
from autopar.ir.graph import Graph, names_layout_copy
from autopar.ir.layout import REPLICATED, TP, AxisSizes, Layout, broadcast_layout, look_up, pattern_of, split_layout
from autopar.ir.plan import Plan
from autopar.ir.tensor_axes import tensor_axes
from autopar.sharding.lookup import local_rule
from autopar.sharding.rule import axis_labels, strategy
from autopar.sharding.shard_graph import labels_on, shard_over_axis


def weight_layouts(plan: Plan, graph: Graph) -> Mapping[str, Layout]:
    """Layout in which the ranks hold each weight.

    Raises:
        PlanError: the plan names a weight that the model lacks, or a layout that a weight cannot have.
    """
    check_table_names("shardings", plan.shardings, [w.name for w in graph.weights])
    storage: dict[str, Layout] = {}
    sizes = plan.mesh.axis_sizes
    for weight in graph.weights:
        text = look_up(plan.shardings, weight.name)
        layout = Layout.parse(text) if text is not None else REPLICATED
        if not storable(layout, sizes) or not layout.fits(weight.shape, sizes):
            *_, axis = sizes
            raise PlanError(
                f"Plan field shardings.{weight.name}: it has shape {list(weight.shape)} and cannot lie as {text!r} on "
                f"{axes_text(sizes)}. Split one dim whose size the ranks divide ({axis}:DIM or {axis}:DIMxPARTS), or "
                f"any dim in units ({axis}:DIM@UNIT), write {broadcast_layout(axis)} or {REPLICATED}, or leave it out."
            )
        if weight.kind == "constant" and layout != REPLICATED:
            raise PlanError(
                f"Plan field shardings.{weight.name}: it is a constant of the trace, which is replicated. Leave it out."
            )
        storage[weight.name] = layout
    return storage


def storable(layout: Layout, sizes: AxisSizes) -> bool:
    """Whether weights can have a layout: on each axis replicated, split once, or with a partial gradient.

    Splits are in the order of the axes. A dim that an axis splits raggedly is split by no other.
    """
    whole, ragged = REPLICATED, {split.dim for split in layout.splits if split.unit}
    for axis in sizes:
        own = layout.on(axis)
        splits = (split_layout(s.dim, s.outer, axis, s.unit) for s in own.splits)
        if own not in (REPLICATED, broadcast_layout(axis), *splits):
            return False
        whole = whole.then(own)
    dims = [split.dim for split in layout.splits]
    return whole == layout and all(dims.count(dim) == 1 for dim in ragged)


def axes_text(sizes: AxisSizes) -> str:
    """``4 ranks``, or ``axes tp0 of 2 and tp1 of 2 ranks``."""
    if len(sizes) == 1:
        return f"{sizes[TP]} ranks"
    return f"axes {' and '.join(f'{axis} of {size}' for axis, size in sizes.items())} ranks"


def check_strategies(plan: Plan, graph: Graph, storage: Mapping[str, Layout]) -> None:
    """Refuse strategies that the graph's operations, or collectives of outer axes, do not have.

    Args:
        storage: layout of each weight.
    Raises:
        PlanError: names the field and the factors of the operation.
    """
    names = [op.name for op in graph.ops]
    for axis in tensor_axes(plan.mesh.axis_sizes):
        labels = labels_on(axis, plan.strategies, graph)
        for op in graph.ops:
            label, rule = labels.get(op.name), local_rule(op, graph)
            if label and (rule is None or strategy(rule, label, axis.ranks) is None):
                free = {letter: rule.sizes[letter] for letter in rule.free} if rule is not None else {}
                raise PlanError(
                    f"Plan field strategies: {op.name} ({op.target}) cannot run split by {label!r} on {axis.ranks} "
                    f"ranks. Its factors and their sizes: {free or 'none'}."
                )
        stored = {name: layout.on(axis.name) for name, layout in storage.items()}
        graph = shard_over_axis(graph, labels, stored, axis, dict.fromkeys((op.name for op in graph.ops), 0))
        names += [op.name for op in graph.ops if op.home]
    check_table_names("strategies", plan.strategies, names)
    unknown = {axis for text in plan.strategies.values() for axis in axis_labels(text)} - plan.mesh.axis_sizes.keys()
    if unknown:
        raise PlanError(
            f"Plan field strategies: no axis {min(unknown)!r}. The tensor axes are {', '.join(plan.mesh.axis_sizes)}."
        )


def check_table_names(field: str, table: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse entries of a plan's table that match no name in the model, but for copies that this batch does without."""
    known = {*names, *map(pattern_of, names)}
    for name in table:
        if name not in known and not names_layout_copy(name):
            raise PlanError(f"Plan field {field}: the model has no {name!r}.{suggest(name, sorted(known))}")
