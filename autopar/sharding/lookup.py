"""The rule of an operation at its shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest

from autopar.ir.graph import Graph, Op, refs, renamed
from autopar.sharding.bound_call import BoundCall, RuleFunction, Shape
from autopar.sharding.parse import bind
from autopar.sharding.rule import Dims, Rule
from autopar.sharding.table import RULES, UPDATING

Entry = str | RuleFunction


def local_rule(op: Op, graph: Graph) -> Rule | None:
    """The rule of an operation of a graph, operands as in ``Op.reads``; None where it must be replicated.

    Dims whose size differs between ranks of an outer axis are whole, so that all ranks have the same strategies.
    """
    rule = rule_of(op, graph.shapes.__getitem__)
    names = (*op.reads, *(value.name for value in op.outputs))
    if rule is None or graph.uneven.keys().isdisjoint(names):
        return rule
    tensors = zip(names, (*rule.operands, *rule.outputs), strict=True)
    letters = {x for name, dims in tensors for dim in graph.uneven.get(name, ()) for x in dims[dim]}
    return replace(rule, whole=rule.whole | letters)


def rule_of(op: Op, shape_of: Callable[[str], Shape]) -> Rule | None:
    """The rule of an operation, operands as in ``Op.reads``; None where there is none and it must be replicated.

    In-place operations have none, except for normalisations that update their statistics.

    Args:
        shape_of: the whole shape of a value or weight.
    """
    key = key_of(op.target)
    if key is None or not op.outputs or (op.mutates and key not in UPDATING):
        return None
    numbers = {name: str(number) for number, name in enumerate(op.reads)}
    args, kwargs = (renamed(tree, numbers) for tree in (op.args, op.kwargs))
    shapes = tuple(tuple(shape_of(name)) for name in op.reads)
    outputs = tuple(v.shape for v in op.outputs)
    return rule_of_entry(RULES[key], Op("", op.target, args, kwargs, (), ""), shapes, outputs)


@lru_cache(maxsize=4096)
def rule_of_entry(entry: Entry, op: Op, shapes: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> Rule | None:
    """The rule that an entry of `RULES` gives for an operation whose references are numbers of its operands.

    Cached: without names, a model has few different operations, and each is looked up for every number of ranks.
    """
    occurrences = tuple(refs((op.args, tuple(value for _, value in op.kwargs))))
    call = BoundCall(op, tuple(shapes[int(number)] for number in occurrences), outputs)
    rule = bind(entry, call) if isinstance(entry, str) else entry(call)
    return rule and merge_repeated(rule, occurrences)


def key_of(target: str) -> str | None:
    """The key of `RULES` for an operation: its overload, else its name."""
    overload = target.removeprefix("aten.")
    return next((key for key in (overload, overload.rpartition(".")[0]) if key in RULES), None)


def merge_repeated(rule: Rule, occurrences: tuple[str, ...]) -> Rule:
    """A rule with one operand for each distinct tensor.

    Where a tensor stands at several positions, a letter that is not the same at all of them becomes whole.
    """
    first: dict[str, Dims] = {}
    whole = set(rule.whole)
    added = dict.fromkeys(occurrences, True)
    for number, (name, dims) in enumerate(zip(occurrences, rule.operands, strict=True)):
        added[name] &= number in rule.added
        for one, other in zip_longest(first.setdefault(name, dims), dims, fillvalue=()):
            if one != other:
                whole |= {*one, *other}
    return replace(
        rule,
        operands=tuple(first.values()),
        whole=frozenset(whole),
        added=frozenset(number for number, name in enumerate(first) if added[name]),
    )
