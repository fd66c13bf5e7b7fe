"""One rank's part of an operation: integer arguments that describe whole tensors are rewritten for local ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.ir.graph import Op, Value, dense_strides
from autopar.ir.layout import Split
from autopar.sharding import localise_space
from autopar.sharding.bound_call import Shape, argument
from autopar.sharding.local_op import LocalOp, with_argument
from autopar.sharding.lookup import key_of
from autopar.sharding.rule import Rule, Strategy, factor_of


def localised(op: Op, rule: Rule, strategy: Strategy, ranks: int, rank: int = 0) -> Op:
    """The operation that a rank runs under a strategy, with its outputs' local shapes and strides.

    A view becomes a reshape even where nothing is split: a collective or another strategy may give its input other
    strides than the trace had.

    Args:
        ranks: number of ranks that the strategy splits over.
        rank: among them; it makes a difference to ragged splits alone.
    """
    assert len(strategy.outputs) == len(op.outputs) == len(rule.outputs), f"{strategy} of {op.name}"
    sizes = {split.axis: ranks for made in strategy.outputs for split in made.splits}
    index = dict.fromkeys(sizes, rank)
    shapes = tuple(made.local_shape(v.shape, sizes, index) for made, v in zip(strategy.outputs, op.outputs))
    part = LocalOp(op, rule, strategy.outputs, shapes, factor_of(strategy.label), ranks, rank)
    outputs = tuple(local_value(value, shape) for value, shape in zip(op.outputs, shapes))
    key = key_of(op.target)
    localise = (LOCALISED if part.letter else ALWAYS_LOCALISED).get(key or "", unchanged)
    return replace(localise(part), outputs=outputs)


def local_value(value: Value, shape: Shape) -> Value:
    """The value of one rank: dense, with its dims in memory in the order of the whole value's."""
    if shape == value.shape:
        return value
    return replace(value, shape=shape, stride=dense_strides(shape, value.memory_order))


def unchanged(part: LocalOp) -> Op:
    """The operation itself, whose arguments do not depend on what is split."""
    return part.op


def reshaped(part: LocalOp) -> Op:
    """A reshape to the local shape, for any operation that only changes the shape.

    That includes squeeze, which would also drop a dim of which each rank has one element.
    """
    return replace(part.op, target="aten.reshape.default", args=(part.op.args[0], part.shapes[0]), kwargs=())


def reshaped_alike(part: LocalOp) -> Op:
    """view_as without its requirements on strides."""
    return replace(part.op, target="aten.reshape_as.default")


def local_size(position: int, name: str) -> Callable[[LocalOp], Op]:
    """A function that replaces the output's whole shape in an argument by the local shape."""
    return lambda part: with_argument(part.op, position, name, part.shapes[0])


def local_repeats(name: str) -> Callable[[LocalOp], Op]:
    """A function that replaces repetitions by a rank's number where they are split.

    Repetitions count the last dims if they are fewer than dims.
    """

    def localise(part: LocalOp) -> Op:
        whole_repeats = argument(part.op, 1, name)
        first = len(part.shapes[0]) - len(whole_repeats)
        repeats = (part.share(n) if part.letter == f"r{first + i}" else n for i, n in enumerate(whole_repeats))
        return with_argument(part.op, 1, name, tuple(repeats))

    return localise


def local_split_size(part: LocalOp) -> Op:
    """split.Tensor with the local size of a part."""
    dim = argument(part.op, 2, "dim", 0)
    return with_argument(part.op, 1, "split_size", part.shapes[0][dim])


def local_split_sizes(name: str) -> Callable[[LocalOp], Op]:
    """split_with_sizes with the local sizes of the parts."""

    def localise(part: LocalOp) -> Op:
        dim = argument(part.op, 2, "dim", 0)
        return with_argument(part.op, 1, name, tuple(shape[dim] for shape in part.shapes))

    return localise


def local_outer(*positions: int) -> Callable[[LocalOp], Op]:
    """A function that replaces ``outer`` of a collective by this rank's part where it is split.

    Args:
        positions: of the arguments with the numbers of the dims, each followed by ``outer``.
    """

    def localise(part: LocalOp) -> Op:
        args = [*part.op.args]
        for at in positions:
            if part.letter == f"o{args[at]}":
                args[at + 1] = part.share(args[at + 1])
        return replace(part.op, args=tuple(args))

    return localise


def local_length(part: LocalOp) -> Op:
    """narrow with the local length."""
    return with_argument(part.op, 3, "length", part.shapes[0][argument(part.op, 1, "dim")])


def local_uniform(part: LocalOp) -> Op:
    """Random numbers of a rank's samples, or of its part of every sample."""
    if part.letter == "b":
        return with_argument(part.op, 1, "shape", part.shapes[0])
    (split,) = part.layouts[0].splits
    ragged = (ragged_part(split, part.op.outputs[0].shape, part.rank),) if split.unit else ()
    return replace(part.op, args=(*part.op.args, split.dim, split.outer, part.ranks, split.axis, *ragged))


def ragged_part(split: Split, shape: Shape, rank: int) -> tuple[int, int, int]:
    """Argument ``ragged`` of operators on a rank's part of a tensor of ``shape``; see `autopar.ops.collectives`."""
    return shape[split.dim] // split.outer, split.unit, rank


# Even if replicated, these require strides that their input may lack.
ALWAYS_LOCALISED: Mapping[str, Callable[[LocalOp], Op]] = {"view.default": reshaped, "view_as": reshaped_alike}

LOCALISED: Mapping[str, Callable[[LocalOp], Op]] = {
    **ALWAYS_LOCALISED,
    "_unsafe_view": reshaped,
    "reshape": reshaped,
    "squeeze": reshaped,
    "unflatten.int": reshaped,
    "expand": local_size(1, "size"),
    "broadcast_to": local_size(1, "size"),
    "repeat": local_repeats("repeats"),
    "tile": local_repeats("dims"),
    "split.Tensor": local_split_size,
    "split.sizes": local_split_sizes("split_size"),
    "split_with_sizes": local_split_sizes("split_sizes"),
    "narrow": local_length,
    "autopar.uniform": local_uniform,
    "autopar.shard": local_outer(1),
    "autopar.reduce_scatter": local_outer(1),
    "autopar.all_gather": local_outer(1),
    "autopar.all_to_all": local_outer(1, 3),
    **localise_space.LOCALISED,
}
