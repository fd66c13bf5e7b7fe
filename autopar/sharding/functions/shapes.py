"""Rules of elementwise operations and of operations that rearrange elements: functions of the shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from string import ascii_lowercase

from autopar.sharding.bound_call import BoundCall, RuleFunction, Shape, broadcast_letters, dim_letters, ints, make_rule
from autopar.sharding.rule import Dims, Rule

# -- elementwise -----------------------------------------------------------------------------------------------


def elementwise(call: BoundCall) -> Rule | None:
    """Operands are broadcast to the output; expand too, whose output shape is an argument."""
    letters = dim_letters(call.outputs[0])
    operands = [broadcast_letters(shape, call.outputs[0], letters) for shape in call.operands]
    return make_rule(call, [o for o in operands if o is not None], [letters])


def prelu(call: BoundCall) -> Rule | None:
    """Each channel of [batch, channels, …] has a slope, or all have one."""
    letters, (values, slopes) = dim_letters(call.outputs[0]), call.operands
    return make_rule(call, [letters, letters[1:2] if slopes == values[1:2] else ((),) * len(slopes)], [letters])


def like_second(call: BoundCall) -> Rule | None:
    """The first operand in the dtype of the second (type_as); the layout of the second does not matter."""
    if call.operands[0] == call.operands[-1]:
        return elementwise(call)
    letters, other = dim_letters(call.operands[0]), dim_letters(call.operands[1], "u")
    return make_rule(call, [letters, other], [letters], unread=flat(other))


def new_tensor(call: BoundCall) -> Rule | None:
    """A tensor of a given size in the dtype of an operand (new_zeros): replicated, whatever the operand's layout."""
    letters, made = dim_letters(call.operands[0], "u"), dim_letters(call.outputs[0])
    return make_rule(call, [letters], [made], unread=flat(letters), whole=flat(made))


def replicated(call: BoundCall) -> Rule | None:
    """Never split."""
    operands = [dim_letters(shape, f"i{n}d") for n, shape in enumerate(call.operands)]
    outputs = [dim_letters(shape, f"o{n}d") for n, shape in enumerate(call.outputs)]
    return make_rule(call, operands, outputs, whole=[x for dims in outputs for x in flat(dims)])


def random(call: BoundCall) -> Rule | None:
    """A stateful random operation: its layout is the operand's, but it is never split.

    Ranks that each drew a part from their generators would draw equal numbers for different parts.
    """
    rule = elementwise(call)
    return rule and replace(rule, whole=frozenset(rule.sizes))


def dropout(call: BoundCall) -> Rule | None:
    """Random, unless it drops nothing."""
    return random(call) if call.argument(1, "p", 0.5) and call.argument(2, "train", True) else elementwise(call)


def counter_random(call: BoundCall) -> Rule | None:
    """Numbers drawn by counters: any dim can be split, and the samples with their rows of the first operand.

    An operation that draws a part of an axis is not split further: all its elements follow from a counter of one split.
    """
    if len(call.op.args) > 5:
        return replicated(call)
    dim, outer = call.argument(3, "sample_dim"), call.argument(4, "sample_outer")
    made = dim_letters(call.outputs[0])
    if dim < 0:
        rows = dim_letters(call.operands[0], "u")
        return make_rule(call, [rows], [made], whole=flat(rows))
    samples = call.operands[0][0]
    sizes = {"o": outer, "b": samples, "r": call.outputs[0][dim] // (outer * samples)}
    made = (*made[:dim], ("o", "b", "r"), *made[dim + 1 :])
    return make_rule(call, [(("b",), ("w",))], [made], sizes=sizes, whole=["w"])


def flat(dims: Dims) -> list[str]:
    """All letters of a tensor."""
    return [letter for dim in dims for letter in dim]


# -- the same elements in other dims -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CommonFactor:
    """A factor of two shapes: its size, and its dim in either (None where only the other has it)."""

    size: int
    dims: tuple[int | None, int | None]


def reshape(call: BoundCall) -> Rule | None:
    """Dims merged and divided; view_as also reads the tensor that gives the shape."""
    if 0 in call.operands[0]:
        return None  # without elements, common factors are ambiguous
    factors = regroup(call.operands[0], call.outputs[0])
    letters = [ascii_lowercase[i % 26] + str(i // 26 or "") for i in range(len(factors))]

    def named(side: int, rank: int) -> Dims:
        return tuple(tuple(x for x, f in zip(letters, factors) if f.dims[side] == dim) for dim in range(rank))

    before, after = named(0, len(call.operands[0])), named(1, len(call.outputs[0]))
    sizes = {x: f.size for x, f in zip(letters, factors)}
    whole = [x for x, f in zip(letters, factors) if None in f.dims]
    return make_rule(call, [before] + [after] * (len(call.operands) - 1), [after], sizes=sizes, whole=whole)


def regroup(before: Shape, after: Shape) -> list[CommonFactor]:
    """The factors that two shapes of equal size have in common, outermost first.

    Common factors are taken off both ends until the boundaries of the two shapes cross ([4, 6] as [6, 4] leaves 2·3
    against 3·2 in the middle). A size of 1 is a factor as well, so that a batch of 1 has the same letters as any other.
    """
    rest = (dict(enumerate(before)), dict(enumerate(after)))
    outer = take_common(rest, min)
    inner = take_common(rest, max)
    middle = [CommonFactor(size, (dim, None)) for dim, size in rest[0].items()]
    middle += [CommonFactor(size, (None, dim)) for dim, size in rest[1].items()]
    return [*outer, *middle, *reversed(inner)]


def take_common(
    rest: tuple[dict[int, int], dict[int, int]], end: Callable[[dict[int, int]], int]
) -> list[CommonFactor]:
    """Factors common to both shapes, from one end inwards, divided out of ``rest``.

    Args:
        rest: the remaining size of each dim, per shape.
        end: picks the next dim.
    """
    common: list[CommonFactor] = []
    while rest[0] and rest[1]:
        dims = end(rest[0]), end(rest[1])
        sizes = rest[0][dims[0]], rest[1][dims[1]]
        size = gcd(*sizes)
        if size == 1 and 1 not in sizes:
            break
        common.append(CommonFactor(size, dims))
        for left, dim in zip(rest, dims):
            left[dim] //= size
            if left[dim] == 1:
                del left[dim]
    return common


def reordered(order: Callable[[BoundCall], list[int]]) -> RuleFunction:
    """A rule for dims in another order; ``order`` gives the operand dim of each output dim."""

    def rule(call: BoundCall) -> Rule | None:
        letters = dim_letters(call.operands[0])
        return make_rule(call, [letters], [tuple(letters[dim] for dim in order(call))])

    return rule


def permute_order(call: BoundCall) -> list[int]:
    """The order of permute."""
    rank = len(call.operands[0])
    return [dim % rank for dim in call.argument(1, "dims")]


def transpose_order(call: BoundCall) -> list[int]:
    """The order of transpose, or of the transposes without arguments: the last two dims."""
    rank = len(call.operands[0])
    order = list(range(rank))
    if rank > 1:
        a, b = call.argument(1, "dim0", -2) % rank, call.argument(2, "dim1", -1) % rank
        order[a], order[b] = b, a
    return order


def reversed_order(call: BoundCall) -> list[int]:
    """The order of numpy_T: all dims reversed."""
    return list(reversed(range(len(call.operands[0]))))


def movedim_order(call: BoundCall) -> list[int]:
    """The order of movedim."""
    rank = len(call.operands[0])
    source = [dim % rank for dim in ints(call.argument(1, "source"))]
    order = [dim for dim in range(rank) if dim not in source]
    for to, dim in sorted(zip((d % rank for d in ints(call.argument(2, "destination"))), source)):
        order.insert(to, dim)
    return order
