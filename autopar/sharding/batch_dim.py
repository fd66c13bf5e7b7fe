"""Where the samples of the batch lie in every value of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.graph import Graph, Op
from autopar.ir.layout import Layout, split_layout
from autopar.sharding.rule import LABEL, Rule, has, laid_out, letter_of


def sample_dims(graph: Graph, rule_of: Callable[[Op], Rule | None]) -> Mapping[str, Layout]:
    """The split along the samples of every value that has them: followed from the inputs' first dim.

    Args:
        rule_of: an operation's rule, or None.
    """
    batch = graph.batch
    found = {v.name: split_layout(0) for v in graph.inputs if v.shape and v.shape[0] == batch}
    for op in graph.ops:
        number = next((i for i, name in enumerate(op.reads) if name in found), None)
        if number is None:
            continue
        rule, read = rule_of(op), op.reads[number]
        for j, value in enumerate(op.outputs):
            carried = carry(rule, number, j, found[read], batch) if rule is not None else None
            if carried is None and value.shape[:1] == graph.shapes[read][:1] and found[read] == split_layout(0):
                carried = found[read]
            if carried is not None:
                found[value.name] = carried
    return found


def carry(rule: Rule, operand: int, output: int, layout: Layout, ranks: int) -> Layout | None:
    """The layout of an output when an operand is laid out so, even if the letter is whole; None where it has none."""
    label = letter_of(rule, rule.operands[operand], layout, ranks)
    match = LABEL.fullmatch(label) if label else None
    if match is None or not has(rule.outputs[output], match[1]):
        return None
    return laid_out(rule, rule.outputs[output], match[1], int(match[2] or 1), layout.splits[0].axis)
