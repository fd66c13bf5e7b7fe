"""The dim of the batch's samples in every value of a graph.

Rules say where samples lie after an operation. An operation that reads no value with samples, such as
``torch.rand(b, n)``, has none here; tracing at another batch size finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.graph import Graph, Op
from autopar.ir.layout import TP, Layout, split_layout
from autopar.sharding.rule import Rule, factor_layout, factor_of, has_letter, label_of_layout


def sample_dims(graph: Graph, rule_of: Callable[[Op], Rule | None], axis: str = TP) -> Mapping[str, Layout]:
    """For every value with samples, the layout that splits them, followed from the first dim of the inputs.

    Args:
        rule_of: the rule of an operation, or None.
        axis: of the layouts.
    """
    first = split_layout(0, axis=axis)
    layouts = {v.name: first for v in graph.inputs if v.shape and v.shape[0] == graph.batch}
    counts = dict.fromkeys(layouts, graph.batch)  # samples of each value, of which outer axes may have a part
    for op in graph.ops:
        number = next((i for i, name in enumerate(op.reads) if name in layouts), None)
        if number is None:
            continue
        rule, read = rule_of(op), op.reads[number]
        for j, value in enumerate(op.outputs):
            layout, count = None, counts[read]
            if op.home:  # a collective of an outer axis
                layout, dim = layouts[read], layouts[read].splits[0].dim
                count = count * value.shape[dim] // graph.shapes[read][dim]
            elif rule is not None:
                layout = output_layout(rule, number, j, layouts[read], count)
            if layout is None and value.shape[:1] == graph.shapes[read][:1] and layouts[read] == first:
                layout = first
            if layout is not None:
                layouts[value.name], counts[value.name] = layout, count
    return layouts


def output_layout(rule: Rule, operand: int, output: int, layout: Layout, ranks: int) -> Layout | None:
    """The layout of an output when an operand has ``layout``, even if the letter must be whole.

    None where the operand's split is no letter's, or the output lacks the letter.
    """
    label = label_of_layout(rule, rule.operands[operand], layout, ranks)
    factor = factor_of(label) if label else None
    if factor is None or not has_letter(rule.outputs[output], factor.letter):
        return None
    return factor_layout(rule, rule.outputs[output], factor, layout.splits[0].axis)
