"""Rules: which dims of an operation can be split at given shapes, and the layouts that each split implies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autopar.ir.layout import REPLICATED, TP, Layout, Split, broadcast_layout, partial_layout, split_layout

# For each dim of a tensor the letters (factors) of its size, outermost first; () for a dim that is never split.
Dims = tuple[tuple[str, ...], ...]
REPLICATE = ""
LABEL = re.compile(r"(\w+?)(?:x([1-9]\d*))?")


@dataclass(frozen=True)
class Rule:
    """Factors of an operation: dims of its tensors that are split together; splitting a factor splits the operation.

    Args:
        operands, outputs: the letters of each dim of each tensor. An output with a letter is split in it; a letter
            that no output has is summed over.
        sizes: of each letter.
        whole: letters that are never split.
        added: operands that enter a sum over letters as one further summand (a bias). Only the first rank adds it.
        unread: letters of operands of which only dtype and device are read; the outputs are replicated in any case.

    Invariants: a letter stands in at most one dim of a tensor, unless it is whole; a letter that is not whole stands in
    all outputs or in none.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for dims in self.operands + self.outputs:
            letters = [letter for dim in dims for letter in dim]
            twice = {letter for letter in letters if letters.count(letter) > 1}
            assert twice <= self.whole, f"{self} has {twice} in two dims of one tensor"
            assert set(letters) <= set(self.sizes), f"{self} does not know the size of every letter"
        for letter in self.free:
            assert sum(has_letter(dims, letter) for dims in self.outputs) in (0, len(self.outputs)), (
                f"{letter} in {self}"
            )

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The letters that can be split, in order of appearance."""
        letters = (letter for dims in self.operands + self.outputs for dim in dims for letter in dim)
        return tuple(letter for letter in dict.fromkeys(letters) if letter not in self.whole)

    def __str__(self) -> str:
        """The rule as text: ``!`` whole, ``?`` unread, ``+`` added, ``(q h d)`` several factors, ``1`` never split."""
        operands = ", ".join("+" * (i in self.added) + self.words(dims) for i, dims in enumerate(self.operands))
        return f"{operands} -> {', '.join(map(self.words, self.outputs))}".strip()

    def words(self, dims: Dims) -> str:
        """One tensor's dims as text."""

        def word(dim: tuple[str, ...]) -> str:
            letters = " ".join(x + "!" * (x in self.whole) + "?" * (x in self.unread) for x in dim)
            return f"({letters})" if len(dim) > 1 else letters or "1"

        return " ".join(map(word, dims))


@dataclass(frozen=True)
class Strategy:
    """One way to run an operation: the layout in which each operand is read and each output produced.

    ``label`` names the letter that is split; ``nx3`` is letter n read in 3 parts. The empty label is the whole
    operation on every rank.
    """

    label: str
    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


def has_letter(dims: Dims, letter: str) -> bool:
    """Whether a tensor has a letter."""
    return any(letter in dim for dim in dims)


def replicate(rule: Rule) -> Strategy:
    """The whole operation on every rank."""
    return Strategy(REPLICATE, (REPLICATED,) * len(rule.operands), (REPLICATED,) * len(rule.outputs))


def strategy(rule: Rule, label: str, ranks: int, axis: str = TP) -> Strategy | None:
    """The strategy of a label; None where the letter is unknown or whole, or its size does not divide evenly.

    Args:
        label: as in `Strategy.label`.
        ranks: number of ranks on the axis, at least 2.
    """
    if label == REPLICATE:
        return replicate(rule)
    letter, parts = letter_and_parts(label)
    if letter not in rule.free or not rule.sizes[letter] or rule.sizes[letter] % (parts * ranks):
        return None
    summed = not any(has_letter(dims, letter) for dims in rule.outputs)

    def read(number: int, dims: Dims) -> Layout:
        if has_letter(dims, letter):
            return letter_layout(rule, dims, letter, parts, axis)
        if letter in rule.unread:
            return REPLICATED
        return partial_layout(axis) if summed and number in rule.added else broadcast_layout(axis)

    def made(dims: Dims) -> Layout:
        if letter in rule.unread:
            return REPLICATED
        return partial_layout(axis) if summed else letter_layout(rule, dims, letter, parts, axis)

    operands = tuple(read(number, dims) for number, dims in enumerate(rule.operands))
    return Strategy(label, operands, tuple(map(made, rule.outputs)))


def letter_layout(rule: Rule, dims: Dims, letter: str, parts: int, axis: str) -> Layout:
    """The layout of a tensor that has the letter, split in that letter's ``parts`` parts."""
    dim = next(i for i, letters in enumerate(dims) if letter in letters)
    before = dims[dim][: dims[dim].index(letter)]
    return split_layout(dim, prod(rule.sizes[b] for b in before) * parts, axis)


def label_of(letter: str, parts: int = 1) -> str:
    """The label of the strategy that splits a letter read in parts."""
    return letter if parts == 1 else f"{letter}x{parts}"


def letter_and_parts(label: str) -> tuple[str, int]:
    """The letter and the number of parts of a label; no letter for a text that is no label."""
    match = LABEL.fullmatch(label)
    return (match[1], int(match[2] or 1)) if match else ("", 1)


def strategies(rule: Rule, ranks: int, parts: Mapping[str, tuple[int, ...]]) -> tuple[Strategy, ...]:
    """All strategies, the replicated one first, then those of each letter in order of appearance.

    Args:
        parts: numbers of parts to offer besides 1, for letters that are worth splitting other than contiguously.
    """
    labels = [label_of(letter, n) for letter in rule.free for n in dict.fromkeys((1, *parts.get(letter, ())))]
    found = (strategy(rule, label, ranks) for label in labels)
    return (replicate(rule), *(s for s in found if s is not None))


def by_operand(rule: Rule, number: int, layout: Layout, ranks: int) -> Strategy | None:
    """The strategy that reads an operand in exactly this split layout; None if there is none.

    Args:
        number: of the operand, as in ``Op.reads``.
    """
    label = label_of_layout(rule, rule.operands[number], layout, ranks)
    return strategy(rule, label, ranks, layout.splits[0].axis) if label else None


def by_output(rule: Rule, number: int, layout: Layout, ranks: int) -> Strategy | None:
    """The strategy that produces an output in exactly this split layout; None if there is none.

    Args:
        number: of the output, as in ``Op.outputs``.
    """
    label = label_of_layout(rule, rule.outputs[number], layout, ranks)
    return strategy(rule, label, ranks, layout.splits[0].axis) if label else None


def label_of_layout(rule: Rule, dims: Dims, layout: Layout, ranks: int) -> str | None:
    """The label whose letter contains the digit that a layout splits; None where the digit spans letters."""
    if len(layout.splits) != 1 or layout.partial or layout.partial_gradient:
        return None
    split: Split = layout.splits[0]
    before = 1
    for letter in dims[split.dim] if split.dim < len(dims) else ():
        until = before * rule.sizes[letter]
        if split.outer % before == 0 and until % (split.outer * ranks) == 0:
            return label_of(letter, split.outer // before)
        before = until
    return None
