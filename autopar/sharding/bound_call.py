"""One call of an operation with its shapes, and rules built from letters for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.ir.graph import Op
from autopar.sharding.rule import Dims, Halo, Rule, has_letter

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BoundCall:
    """An operation at its shapes. A tensor that stands at two positions is two operands here."""

    op: Op
    operands: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the call, given by position or by name."""
        return argument(self.op, position, name, default)


RuleFunction = Callable[[BoundCall], Rule | None]


def argument(op: Op, position: int, name: str, default: Any = None) -> Any:
    """An argument of an operation, given by position or by name."""
    return op.args[position] if len(op.args) > position else dict(op.kwargs).get(name, default)


def make_rule(
    call: BoundCall,
    operands: Sequence[Dims],
    outputs: Sequence[Dims],
    *,
    sizes: Mapping[str, int] | None = None,
    whole: Iterable[str] = (),
    summed: Iterable[str] = (),
    added: Iterable[int] = (),
    unread: Iterable[str] = (),
    halos: Mapping[str, Halo] | None = None,
) -> Rule | None:
    """The rule with these letters; None where they do not match the shapes.

    A letter that is neither in every output nor declared as summed or unread becomes whole. A rule function that
    forgets a letter therefore costs speed but stays correct.

    Args:
        operands, outputs: letters of each tensor's dims.
        sizes: sizes of letters that share a dim with others; the shapes give the rest.
        whole: letters that are never split.
        summed: letters that no output has and that are summed over.
        added: operands that enter a sum as one further summand.
        unread: letters of operands whose values are not read.
        halos: see `Rule`.
    """
    tensors = [*zip(operands, call.operands), *zip(outputs, call.outputs)]
    if len(operands) != len(call.operands) or len(outputs) != len(call.outputs):
        return None
    size_of = dict(sizes or {})
    for dims, shape in tensors:
        if len(dims) != len(shape):
            return None
        size_of |= {dim[0]: size for dim, size in zip(dims, shape) if len(dim) == 1 and dim[0] not in size_of}
    if any(prod(size_of[x] for x in dim) != size for dims, shape in tensors for dim, size in zip(dims, shape) if dim):
        return None
    everywhere = {letter for letter in size_of if outputs and all(has_letter(dims, letter) for dims in outputs)}
    nowhere = {letter for letter in size_of if not any(has_letter(dims, letter) for dims in outputs)}
    free = everywhere | (nowhere & (set(summed) | set(unread)))
    used = {letter: size for letter, size in size_of.items() if any(has_letter(dims, letter) for dims, _ in tensors)}
    unsplit = frozenset(letter for letter in used if letter not in free) | frozenset(whole) & frozenset(used)
    not_read = frozenset(unread) & frozenset(used)
    return Rule(tuple(operands), tuple(outputs), used, unsplit, frozenset(added), not_read, halos or {})


def dim_letters(shape: Shape, prefix: str = "d") -> Dims:
    """A letter for each dim: d0, d1, …"""
    return tuple((f"{prefix}{i}",) for i in range(len(shape)))


def broadcast_letters(shape: Shape, onto: Shape, letters: Dims) -> Dims | None:
    """Letters of a tensor that is broadcast to a shape; None where it cannot be. Dims of size 1 that stretch get none.

    Args:
        letters: of the shape ``onto``.
    """
    lead = len(onto) - len(shape)
    if lead < 0 or any(a not in (1, b) for a, b in zip(shape, onto[lead:])):
        return None
    return tuple(letters[lead + i] if size == onto[lead + i] else () for i, size in enumerate(shape))


def broadcast_shape(shapes: Sequence[Shape]) -> Shape | None:
    """The common shape to which shapes broadcast; None where they do not."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = tuple(max(sizes, key=lambda size: size != 1) for sizes in zip(*padded))
    return result if all(size in (1, whole) for shape in padded for size, whole in zip(shape, result)) else None


def ints(value: Any) -> tuple[int, ...]:
    """An argument of one integer or several, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def dims_from_front(dims: Any, rank: int) -> frozenset[int]:
    """Non-negative dims; all dims where none are given."""
    listed = () if dims is None else ints(dims)
    return frozenset(dim % rank for dim in listed) if listed and rank else frozenset(range(rank))
