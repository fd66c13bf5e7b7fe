"""Regions of a program's operations that are compiled separately: equal blocks share one compiled region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby

import torch

from autopar.ir.graph import Op, Ref
from autopar.ops.registry import operator

MIN_REGION_OPS = 8  # operations


def region_starts(ops: Sequence[Op], required_starts: Collection[int] = ()) -> tuple[int, ...]:
    """Positions of the operations that each begin a region, 0 first: runs of one numbered module, such as ``blocks.3``.

    A module counts from `MIN_REGION_OPS` operations up; of nested modules (``stages.2``, ``stages.2.blocks.7``) the
    innermost one counts. Fewer operations in between join the region before them. If an operation writes into a value,
    everything is one region, because other readers of that memory are not tracked.

    Args:
        required_starts: positions that begin a region in any case.
    """
    if not ops or any(writes_into_value(op) for op in ops):
        return (0,) if ops else ()
    sizes = Counter(path for op in ops for path in numbered_modules(op.module))
    homes = [next((p for p in numbered_modules(op.module) if sizes[p] >= MIN_REGION_OPS), "") for op in ops]
    runs = [len(list(run)) for _, run in groupby(homes)]
    last = len(runs) - 1
    starts = zip(accumulate(runs, initial=0), enumerate(runs))
    whole = {start for start, (k, length) in starts if k in (0, last) or length >= MIN_REGION_OPS}
    return tuple(sorted(whole.union(required_starts)))


def numbered_modules(module: str) -> Iterator[str]:
    """The modules on a path whose last name has a number, the innermost first."""
    names = module.split(".")
    for depth in range(len(names), 0, -1):
        if any(character.isdigit() for character in names[depth - 1]):
            yield ".".join(names[:depth])


def writes_into_value(op: Op) -> bool:
    """Whether an operation updates a tensor in place that is not a weight's."""
    target = operator(op.target)
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    first = op.args[0] if op.args else None
    return isinstance(first, Ref) and first.name not in op.mutates
