"""Rules of the collectives of an axis, by which the axes inside it split them: parts are summed and moved alike.

A dim that the outer axis splits is read as (outer, ranks, rest), see `autopar.ops.collectives`. An inner axis can split
``outer`` or ``rest``. Ragged parts have other sizes on other ranks of the outer axis, so such a dim stays whole.
"""

from __future__ import annotations

from autopar.sharding.bound_call import BoundCall, RuleFunction, dim_letters, make_rule
from autopar.sharding.rule import Dims, Rule


def resharded(ranks: int, gathered: int | None = None, split: int | None = None) -> RuleFunction:
    """The rule of a collective that gathers a dim, splits one, or both.

    Args:
        ranks: position of the argument with the number of ranks.
        gathered, split: positions of the arguments with the number of the dim, each followed by ``outer``.
    """

    def rule(call: BoundCall) -> Rule | None:
        operand, output, whole = dim_letters(call.operands[0]), dim_letters(call.outputs[0]), set[str]()
        sizes: dict[str, int] = {}
        for at in (gathered, split):
            if at is None:
                continue
            dim, outer = call.op.args[at : at + 2]
            part, joined = f"o{dim} r{dim}".split(), f"o{dim} n{dim} r{dim}".split()
            size = (call.operands[0] if at == gathered else call.outputs[0])[dim]
            if call.op.kwargs:  # ragged
                part, joined = [f"p{dim}"], [f"j{dim}"]
                whole |= {*part, *joined}
            else:
                sizes |= dict(zip(joined, (outer, call.op.args[ranks], size // outer)))
                whole.add(f"n{dim}")
            operand = with_dim(operand, dim, part if at == gathered else joined)
            output = with_dim(output, dim, joined if at == gathered else part)
        return make_rule(call, [operand], [output], sizes=sizes, whole=whole)

    return rule


def with_dim(dims: Dims, dim: int, letters: list[str]) -> Dims:
    """The letters of a tensor, with other ones for one dim."""
    return (*dims[:dim], tuple(letters), *dims[dim + 1 :])
