"""Rules of operations that select, cut, join or reduce dims: functions of the shapes."""

from __future__ import annotations

from autopar.ir.graph import Ref
from autopar.sharding.bound_call import (
    BoundCall,
    RuleFunction,
    broadcast_letters,
    broadcast_shape,
    dim_letters,
    dims_from_front,
    make_rule,
)
from autopar.sharding.rule import Dims, Rule

# -- dims that are read as a whole -------------------------------------------------------------------------------


def along(position: int, name: str, default: int | None = None) -> RuleFunction:
    """A rule for outputs of the operand's shape that mix elements along the dims in one argument (softmax, roll).

    Args:
        default: dim of calls without the argument; None for all dims.
    """

    def rule(call: BoundCall) -> Rule | None:
        letters = dim_letters(call.operands[0])
        dims = dims_from_front(call.argument(position, name, default), len(letters))
        return make_rule(call, [letters], [letters] * len(call.outputs), whole=[f"d{dim}" for dim in dims])

    return rule


def reduced(position: int, summed: bool = False) -> RuleFunction:
    """A rule for outputs without the dims in the argument ``dim``.

    Args:
        position: of that argument.
        summed: whether it is a sum, or a mean of which each rank computes a summand; a maximum is neither.
    """

    def rule(call: BoundCall) -> Rule | None:
        letters = dim_letters(call.operands[0])
        dims = dims_from_front(call.argument(position, "dim"), len(letters))
        kept = [letter for dim, letter in enumerate(letters) if dim not in dims]
        if len(call.outputs[0]) == len(letters):
            kept = [() if dim in dims else letter for dim, letter in enumerate(letters)]
        gone = [f"d{dim}" for dim in dims]
        return make_rule(
            call, [letters], [tuple(kept)] * len(call.outputs),
            summed=gone if summed else (), whole=() if summed else gone,
        )  # fmt: skip

    return rule


def resized(call: BoundCall) -> Rule | None:
    """Dims that keep their size pass, all others are whole: a slice leaves a dim of equal size as it was."""
    letters = dim_letters(call.operands[0])
    made = tuple(
        letter if before == after else ()
        for letter, before, after in zip(letters, call.operands[0], call.outputs[0])
    )  # fmt: skip
    return make_rule(call, [letters], [made])


def cut(position: int, default: int) -> RuleFunction:
    """A rule for outputs with some elements of the dim in one argument (topk, tensor_split): that dim is whole."""

    def rule(call: BoundCall) -> Rule | None:
        letters = dim_letters(call.operands[0])
        dim = call.argument(position, "dim", default) % len(letters)
        made = (*letters[:dim], (), *letters[dim + 1 :])
        return make_rule(call, [letters], [made] * len(call.outputs), whole=[f"d{dim}"])

    return rule


def padded(call: BoundCall) -> Rule | None:
    """Padded dims are whole. A dim can be padded and cut by equal amounts and keep its size, so the amounts decide."""
    amounts = call.argument(1, "pad")
    letters = dim_letters(call.operands[0])
    touched = {len(letters) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    made = tuple(() if dim in touched else letter for dim, letter in enumerate(letters))
    return make_rule(call, [letters], [made], whole=[f"d{dim}" for dim in touched])


def selected(call: BoundCall) -> Rule | None:
    """One index of a dim (select), or each of them as an output (unbind): the dim disappears."""
    letters = dim_letters(call.operands[0])
    dim = call.argument(1, "dim", 0) % len(letters)
    return make_rule(call, [letters], [letters[:dim] + letters[dim + 1 :]] * len(call.outputs), whole=[f"d{dim}"])


def unfolded(call: BoundCall) -> Rule | None:
    """Windows over one dim (Tensor.unfold); their elements are a new last dim."""
    letters = dim_letters(call.operands[0])
    dim = call.argument(1, "dimension") % max(1, len(letters))
    return make_rule(call, [letters], [(*letters[:dim], (), *letters[dim + 1 :], ())], whole=[f"d{dim}"])


def index_selected(call: BoundCall) -> Rule | None:
    """One dim is looked up by a list of indices, which replaces it."""
    letters = dim_letters(call.operands[0])
    if not letters or len(call.operands[1]) != 1:
        return None
    dim = call.argument(1, "dim") % len(letters)
    made = (*letters[:dim], ("i",), *letters[dim + 1 :])
    return make_rule(call, [letters, (("i",),)], [made], whole=[f"d{dim}"])


def indexed(call: BoundCall) -> Rule | None:
    """Dims looked up by index tensors, which are broadcast together and replace those dims.

    Where those dims are not neighbours the index comes first, as in NumPy.
    """
    indices = call.argument(1, "indices")
    at = [dim for dim, index in enumerate(indices) if isinstance(index, Ref)]
    shape = broadcast_shape(call.operands[1:])
    if not at or shape is None or len(indices) > len(call.operands[0]):
        return None
    letters, looked_up = dim_letters(call.operands[0]), dim_letters(shape, "i")
    kept = [letter for dim, letter in enumerate(letters) if dim not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    made = (*kept[:first], *looked_up, *kept[first:])
    operands = [broadcast_letters(operand, shape, looked_up) for operand in call.operands[1:]]
    return make_rule(
        call, [letters, *(o for o in operands if o is not None)], [made], whole=[f"d{dim}" for dim in at]
    )  # fmt: skip


def gathered(position: int) -> RuleFunction:
    """A rule for one dim looked up element by element; the index may be smaller in the others, which are whole then.

    Args:
        position: of the argument with the dim: 1 in gather, 2 in take_along_dim.
    """

    def rule(call: BoundCall) -> Rule | None:
        dim = call.argument(position, "dim")
        if len(call.operands[0]) != len(call.operands[1]) or not call.operands[0] or dim is None:
            return None
        letters, dim = dim_letters(call.operands[0]), dim % len(call.operands[0])
        index = tuple(
            letters[i] if size == call.operands[0][i] and i != dim else (f"i{i}",)
            for i, size in enumerate(call.operands[1])
        )  # fmt: skip
        return make_rule(call, [letters, index], [index], whole=[f"d{dim}", *(x[0] for x in index if x[0][0] == "i")])

    return rule


# -- dims in equal parts -----------------------------------------------------------------------------------------


def parted(rank: int, dim: int) -> Dims:
    """Letters of a tensor with one dim that consists of parts: factor p numbers them, r is the rest."""
    letters = dim_letters((0,) * rank)
    return (*letters[:dim], ("p", "r"), *letters[dim + 1 :])


def split(position: int, default: int = 0) -> RuleFunction:
    """A rule for a dim cut into parts (split, chunk, glu); equal parts are split alike.

    Args:
        position: of the argument with the dim.
        default: the dim where that argument is missing.
    """

    def rule(call: BoundCall) -> Rule | None:
        shape = call.operands[0]
        dim = call.argument(position, "dim", default) % len(shape)
        lengths = {made[dim] for made in call.outputs}
        size = call.outputs[0][dim]
        letters = dim_letters(shape)
        if len(lengths) > 1 or not size or shape[dim] % size or not is_equal_split(call, shape[dim] // size):
            apart = (*letters[:dim], (), *letters[dim + 1 :])
            return make_rule(call, [letters], [apart] * len(call.outputs))
        made = (*letters[:dim], ("r",), *letters[dim + 1 :])
        sizes = {"p": shape[dim] // size, "r": size}
        return make_rule(call, [parted(len(shape), dim)], [made] * len(call.outputs), sizes=sizes)

    return rule


def is_equal_split(call: BoundCall, parts: int) -> bool:
    """Whether a rank has as many parts: chunk makes fewer than requested where sizes do not divide."""
    return not call.op.target.startswith("aten.chunk") or call.argument(1, "chunks") == parts


def joined(call: BoundCall) -> Rule | None:
    """Tensors one after the other along a dim (cat); tensors of equal length are split alike."""
    rank = len(call.outputs[0])
    dim = call.argument(1, "dim", 0) % rank
    letters = dim_letters(call.outputs[0])
    lengths = {shape[dim] for shape in call.operands if len(shape) == rank}
    if len(lengths) != 1:
        apart = (*letters[:dim], (), *letters[dim + 1 :])
        return make_rule(call, [apart] * len(call.operands), [apart])
    sizes = {"p": len(call.operands), "r": min(lengths)}
    each = (*letters[:dim], ("r",), *letters[dim + 1 :])
    return make_rule(call, [each] * len(call.operands), [parted(rank, dim)], sizes=sizes, whole="p")


def stacked(call: BoundCall) -> Rule | None:
    """Tensors along a new dim."""
    letters = dim_letters(call.operands[0])
    dim = call.argument(1, "dim", 0) % len(call.outputs[0])
    made = (*letters[:dim], ("p",), *letters[dim:])
    return make_rule(call, [letters] * len(call.operands), [made], whole="p")


def repeated(call: BoundCall) -> Rule | None:
    """Every dim repeated (repeat, tile): the repetitions are a factor outside the dim."""
    repeats = call.argument(1, "dims" if call.op.target.startswith("aten.tile") else "repeats")
    repeats = (1,) * (len(call.operands[0]) - len(repeats)) + repeats
    lead = len(repeats) - len(call.operands[0])
    sizes = {f"r{i}": times for i, times in enumerate(repeats)}
    sizes |= {f"d{i + lead}": size for i, size in enumerate(call.operands[0])}
    made = tuple((f"r{i}", f"d{i}") if i >= lead else (f"r{i}",) for i in range(len(repeats)))
    return make_rule(call, [dim_letters(call.outputs[0])[lead:]], [made], sizes=sizes)


def repeated_each(call: BoundCall) -> Rule | None:
    """Every element of a dim several times in a row (repeat_interleave)."""
    dim, rank = call.argument(2, "dim"), len(call.operands[0])
    if dim is None or call.argument(3, "output_size") is not None:
        return None
    dim %= rank
    sizes = {"p": call.operands[0][dim], "r": call.argument(1, "repeats")}
    made = parted(rank, dim)
    return make_rule(call, [(*made[:dim], ("p",), *made[dim + 1 :])], [made], sizes=sizes, whole="r")


def shuffled(call: BoundCall) -> Rule | None:
    """Channels become pixels (pixel_shuffle): [c r s, h, w] -> [c, h r, w s]; or back (pixel_unshuffle)."""
    deep, wide = call.operands[0], call.outputs[0]
    back = deep[-2] > wide[-2]
    if back:
        deep, wide = wide, deep
    lead = dim_letters(deep[:-3])
    factor = call.argument(1, "downscale_factor" if back else "upscale_factor")
    sizes = {"c": wide[-3], "h": deep[-2], "w": deep[-1], "r": factor, "s": factor}
    deep_dims: Dims = (*lead, ("c", "r", "s"), ("h",), ("w",))
    wide_dims: Dims = (*lead, ("c",), ("h", "r"), ("w", "s"))
    sides = (wide_dims, deep_dims) if back else (deep_dims, wide_dims)
    return make_rule(call, [sides[0]], [sides[1]], sizes=sizes, whole="rs")


def channels_shuffled(call: BoundCall) -> Rule | None:
    """Groups of channels are interleaved (channel_shuffle): [n, g c, …] -> [n, c g, …]."""
    rest, groups = dim_letters(call.operands[0])[2:], call.argument(1, "groups")
    sizes = {"g": groups, "c": call.operands[0][1] // groups}
    return make_rule(call, [(("n",), ("g", "c"), *rest)], [(("n",), ("c", "g"), *rest)], sizes=sizes, whole="g")
