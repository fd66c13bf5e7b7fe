"""The rule of an operation at its shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

from autopar.ir import Op, refs
from autopar.rules.call import Call, Shape
from autopar.rules.rule import Dims, Rule
from autopar.rules.table import RULES, UPDATING
from autopar.rules.text import bind


def rule_of(op: Op, shape_of: Callable[[str], Shape]) -> Rule | None:
    """The rule of an operation, operands as in ``Op.reads``; None where there is none and it has to be replicated.

    In-place operations have none, but for the normalisations that update their statistics.

    Args:
        shape_of: the whole shape of a value or weight.
    """
    key = key_of(op.target)
    if key is None or not op.outputs or (op.mutates and key not in UPDATING):
        return None
    occurrences = tuple(refs((op.args, tuple(value for _, value in op.kwargs))))
    call = Call(op, tuple(tuple(shape_of(name)) for name in occurrences), tuple(v.shape for v in op.outputs))
    entry = RULES[key]
    rule = bind(entry, call) if isinstance(entry, str) else entry(call)
    return rule and merged(rule, occurrences)


def key_of(target: str) -> str | None:
    """The entry of `RULES` for an operation: by its overload, else by its name."""
    if not target.startswith("aten."):
        return None
    overload = target.removeprefix("aten.")
    return next((key for key in (overload, overload.rpartition(".")[0]) if key in RULES), None)


def merged(rule: Rule, occurrences: tuple[str, ...]) -> Rule:
    """The same rule with one operand for each distinct tensor.

    Where a tensor stands at several positions, what is not the same letter at all of them is whole.
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
