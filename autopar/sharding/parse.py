"""Rules written as text: ``... k, n k, +n -> ... n``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from autopar.sharding.bound_call import BoundCall, make_rule
from autopar.sharding.rule import Dims, Rule

WORD = re.compile(r"([a-z]|\.\.\.)(!?)")
REST = "..."


@dataclass(frozen=True)
class Pattern:
    """A parsed rule: the letters of each operand and output; ``...`` stands for any number of dims, one letter each."""

    operands: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    added: frozenset[int]


@lru_cache
def parse(text: str) -> Pattern:
    """The rule in a text; ``!`` marks letters that must be whole and ``+`` an operand that is added to a sum."""
    left, right = text.split("->")
    operands = [part.strip() for part in left.split(",")]
    whole: set[str] = set()

    def letters(part: str) -> tuple[str, ...]:
        words = [WORD.fullmatch(word) for word in part.removeprefix("+").split()]
        assert all(words), f"{part!r} in {text!r}"
        whole.update(word[1] for word in words if word and word[2])
        return tuple(word[1] for word in words if word)

    return Pattern(
        tuple(map(letters, operands)),
        tuple(letters(part) for part in right.split(",")),
        frozenset(whole),
        frozenset(i for i, part in enumerate(operands) if part.startswith("+")),
    )


def bind(text: str, call: BoundCall) -> Rule | None:
    """The rule of a text for a call's shapes; None where they do not match it.

    Operands at the end of the text may be missing from the call. Letters that no output has are summed over.
    """
    pattern = parse(text)
    if len(call.operands) > len(pattern.operands):
        return None
    names = (*pattern.operands[: len(call.operands)], *pattern.outputs)
    tensors = [letters_per_dim(letters, len(shape)) for letters, shape in zip(names, call.operands + call.outputs)]
    if None in tensors:
        return None
    dims = [t for t in tensors if t is not None]
    rest = {x for tensor in dims for dim in tensor for x in dim if len(x) > 1} if REST in pattern.whole else set()
    return make_rule(
        call,
        dims[: len(call.operands)],
        dims[len(call.operands) :],
        whole=pattern.whole | rest,
        summed={x for tensor in names for x in tensor},
        added=pattern.added & set(range(len(call.operands))),
    )


def letters_per_dim(letters: tuple[str, ...], rank: int) -> Dims | None:
    """Letters for each dim of a tensor; None if the rank does not match. ``...`` is d0, d1, … by position."""
    if REST not in letters:
        return tuple((x,) for x in letters) if len(letters) == rank else None
    at, more = letters.index(REST), rank - len(letters) + 1
    if more < 0:
        return None
    return tuple((x,) for x in (*letters[:at], *(f"d{at + i}" for i in range(more)), *letters[at + 1 :]))
