"""The strategy of every operation of a graph, and the layout of every value and weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Op
from autopar.ir.layout import REPLICATED, Layout
from autopar.ir.tensor_axes import TensorAxis
from autopar.sharding.lookup import local_rule, rule_of
from autopar.sharding.rule import REPLICATE, Rule, Strategy, by_operand, replicate, strategy


@dataclass(frozen=True)
class GraphSharding:
    """The result of `assign`.

    Args:
        rules: rules of the operations that can run under several strategies.
        strategies: of every operation, operands as in ``Op.reads``. A tensor without gradient is never partial in it.
        layouts: layout of every value, as produced, and of every weight.
    """

    rules: Mapping[str, Rule]
    strategies: Mapping[str, Strategy]
    layouts: Mapping[str, Layout]


def assign(graph: Graph, labels: Mapping[str, str], stored: Mapping[str, Layout], axis: TensorAxis) -> GraphSharding:
    """The strategy of every operation of a graph on one axis.

    An operation runs under its label. Without a label that fits its shapes, it follows its operands: the first operand
    that is split decides, values before weights, if the rule has a strategy for it. Otherwise the operation is
    replicated, and so is everything that touches memory which the model updates in place.

    Args:
        labels: by operation name; the empty label is replicated.
        stored: layouts of weights; replicated where they are not listed.

    Raises:
        PlanError: an operation cannot update a weight in place where it is stored.
    """
    trained = trained_names(graph)
    layouts = {name: without_gradient_sum(stored.get(name, REPLICATED), name in trained) for name in graph.shapes}
    stateful = updated_in_place(graph)
    rules: dict[str, Rule] = {}
    chosen: dict[str, Strategy] = {}
    for op in graph.ops:
        rule = local_rule(op, graph)
        if rule is None or op.name in stateful:
            decided = replicated(op)
        else:
            rules[op.name] = rule
            preferred = in_gradients(op, choose_strategy(op, rule, labels, layouts, graph, axis), trained)
            decided = in_gradients(op, state_preserving(op, rule, preferred, stored, axis.ranks), trained)
        check_updates(op, decided, stored)
        chosen[op.name] = decided
        layouts |= {value.name: layout for value, layout in zip(op.outputs, decided.outputs, strict=True)}
    return GraphSharding(rules, chosen, layouts)


def ops_without_rule(graph: Graph) -> tuple[str, ...]:
    """Targets of the operations on activations that have no rule, sorted: every rank runs them whole."""
    on_values = (op for op in graph.ops if op.outputs and not graph.values.keys().isdisjoint(op.reads))
    return tuple(sorted({op.target for op in on_values if rule_of(op, graph.shapes.__getitem__) is None}))


def replicated(op: Op) -> Strategy:
    """The whole operation on every rank, whether or not it has a rule."""
    return Strategy(REPLICATE, (REPLICATED,) * len(op.reads), (REPLICATED,) * len(op.outputs))


def choose_strategy(
    op: Op, rule: Rule, labels: Mapping[str, str], layouts: Mapping[str, Layout], graph: Graph, axis: TensorAxis
) -> Strategy:
    """The strategy of an operation's label, or else the strategy that follows its operands."""
    labelled = strategy(rule, labels[op.name], axis.ranks, axis.name) if op.name in labels else None
    if labelled is not None:
        return labelled
    order = sorted(range(len(op.reads)), key=lambda i: op.reads[i] in graph.weight)
    first = next((i for i in order if layouts[op.reads[i]].splits), None)
    followed = by_operand(rule, first, layouts[op.reads[first]], axis.ranks) if first is not None else None
    return followed or replicate(rule)


def state_preserving(op: Op, rule: Rule, preferred: Strategy, stored: Mapping[str, Layout], ranks: int) -> Strategy:
    """The preferred strategy; another one where that would update a weight in another layout than it is stored in."""
    for name in op.mutates:
        if name not in stored or read_layout(op, preferred, name) == stored[name]:
            continue
        return by_operand(rule, op.reads.index(name), stored[name], ranks) or replicate(rule)
    return preferred


def check_updates(op: Op, chosen: Strategy, stored: Mapping[str, Layout]) -> None:
    """Raise a PlanError where an operation would update a weight in another layout than it is stored in."""
    for name in op.mutates:
        if name in stored and read_layout(op, chosen, name) != stored[name]:
            together = [other for other in op.mutates if other != name]
            alike = f" and {' and '.join(together)} alike" if together else ""
            raise PlanError(
                f"Plan field shardings.{name}: {op.name} updates it in place and cannot do so while it lies as "
                f"'{stored[name]}'. Write '{read_layout(op, chosen, name)}'{alike}."
            )


def read_layout(op: Op, chosen: Strategy, name: str) -> Layout:
    """The layout in which an operation reads a value or weight; replicated if it updates the weight through a view."""
    return chosen.operands[op.reads.index(name)] if name in op.reads else REPLICATED


def storage_layout(layouts: set[Layout]) -> Layout:
    """The layout in which a weight is stored that is read in these layouts."""
    if len(layouts) != 1:
        return REPLICATED
    (layout,) = layouts
    return REPLICATED if layout.partial else layout


# -- gradients and memory ------------------------------------------------------------------------------------------


def trained_names(graph: Graph) -> frozenset[str]:
    """Names of the values and weights that get a gradient; a model may be trained in eval mode too."""
    return frozenset(x.name for x in (*graph.values.values(), *graph.weights) if x.requires_grad)


def in_gradients(op: Op, found: Strategy, trained: Collection[str]) -> Strategy:
    """The strategy without partial gradients for operands that have no gradient."""
    pairs = zip(op.reads, found.operands, strict=True)
    operands = tuple(without_gradient_sum(layout, name in trained) for name, layout in pairs)
    return Strategy(found.label, operands, found.outputs)


def without_gradient_sum(layout: Layout, trained: bool) -> Layout:
    """The layout of a tensor; a tensor without gradient is not partial in it."""
    return layout if trained or not layout.partial_gradient else Layout(layout.splits, layout.partial)


def updated_in_place(graph: Graph) -> frozenset[str]:
    """Names of the operations that touch memory which an operation without outputs, or through a view, updates.

    A resharding would give that operation a copy of the memory.
    """
    by_name = {op.name: op for op in graph.ops}
    stateful = {op.name for op in graph.ops if not op.outputs or not set(op.mutates) <= set(op.reads)}
    for names in graph.colocated:
        members = [by_name[name] for name in names]
        updates = [op for op in members if op.name in stateful]
        if any(touches(other, op) for op in updates for other in members if other is not op):
            stateful.update(names)
    return frozenset(stateful)


def touches(other: Op, op: Op) -> bool:
    """Whether an operation reads, produces or updates what another one reads.

    A counter of batches is colocated with an operation of its module that does none of this.
    """
    return not set(op.reads).isdisjoint((*other.reads, *(v.name for v in other.outputs), *other.mutates))
