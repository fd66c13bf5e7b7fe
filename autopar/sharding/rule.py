"""Rules: which dims of an operation can be split at given shapes, and the layouts that each split implies."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from autopar.ir.layout import REPLICATED, TP, Layout, Split, broadcast_layout, partial_layout, split_layout

# For each dim of a tensor the letters (factors) of its size, outermost first; () for a dim that is never split.
Dims = tuple[tuple[str, ...], ...]
REPLICATE = ""
LABEL = re.compile(r"(\w+?)(?:x([1-9]\d*))?(?:@([1-9]\d*))?")


@dataclass(frozen=True)
class Halo:
    """Elements of a dim before and after a rank's part that its part of an operation reads too."""

    before: int
    after: int


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
        halos: of letters whose parts overlap in the first operand; the operation gets its halo from the neighbours.

    Invariants: a letter stands in at most one dim of a tensor, unless it is whole; a letter that is not whole stands in
    all outputs or in none.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()
    halos: Mapping[str, Halo] = field(default_factory=dict)

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
        """The rule as text: ``!`` whole, ``?`` unread, ``+`` added, ``(q h d)`` several factors, ``1`` never split.

        ``y~`` has a halo.
        """
        operands = ", ".join("+" * (i in self.added) + self.words(dims) for i, dims in enumerate(self.operands))
        return f"{operands} -> {', '.join(map(self.words, self.outputs))}".strip()

    def words(self, dims: Dims) -> str:
        """One tensor's dims as text."""

        def word(dim: tuple[str, ...]) -> str:
            letters = " ".join(
                x + "!" * (x in self.whole) + "?" * (x in self.unread) + "~" * (x in self.halos) for x in dim
            )
            return f"({letters})" if len(dim) > 1 else letters or "1"

        return " ".join(map(word, dims))


@dataclass(frozen=True)
class Strategy:
    """One way to run an operation: the layout in which each operand is read and each output produced.

    ``label`` names the letter that is split; ``nx3`` is letter n read in 3 parts. ``d1@1`` splits d1 raggedly, ``n@64``
    splits n in units of 64. The empty label is the whole operation on every rank.
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
    """The strategy of a label; None where the letter is unknown or whole, or its size does not divide as it says.

    Args:
        label: as in `Strategy.label`.
        ranks: number of ranks on the axis, at least 2.
    """
    if label == REPLICATE:
        return replicate(rule)
    factor = factor_of(label)
    letter = factor.letter
    if letter not in rule.free or not rule.sizes[letter] or not factor.fits(rule.sizes[letter], ranks):
        return None
    if letter in rule.halos and not reaches_neighbours(rule, factor, ranks):
        return None
    summed = not any(has_letter(dims, letter) for dims in rule.outputs)

    def read(number: int, dims: Dims) -> Layout:
        if has_letter(dims, letter):
            return factor_layout(rule, dims, factor, axis)
        if letter in rule.unread:
            return REPLICATED
        return partial_layout(axis) if summed and number in rule.added else broadcast_layout(axis)

    def made(dims: Dims) -> Layout:
        if letter in rule.unread:
            return REPLICATED
        return partial_layout(axis) if summed else factor_layout(rule, dims, factor, axis)

    operands = tuple(read(number, dims) for number, dims in enumerate(rule.operands))
    return Strategy(label, operands, tuple(map(made, rule.outputs)))


def reaches_neighbours(rule: Rule, factor: Factor, ranks: int) -> bool:
    """Whether the halo of each rank's part lies in the parts of its neighbours alone."""
    halo, (split,) = rule.halos[factor.letter], factor_layout(rule, rule.operands[0], factor, TP).splits
    size = prod(rule.sizes[x] for x in rule.operands[0][split.dim])
    return split.outer == 1 and len(split.part(size, ranks, ranks - 1)) >= max(halo.before, halo.after)


@dataclass(frozen=True)
class Factor:
    """The letter that a label splits, the number of parts in which it is read, and the unit of a ragged split or 0."""

    letter: str
    parts: int = 1
    unit: int = 0

    def fits(self, size: int, ranks: int) -> bool:
        """Whether a letter of this size can be split so."""
        return Split(0, self.parts, unit=self.unit).fits(size, ranks)

    def __str__(self) -> str:
        """The label."""
        parts, unit = f"x{self.parts}" if self.parts > 1 else "", f"@{self.unit}" if self.unit else ""
        return f"{self.letter}{parts}{unit}"


def factor_of(label: str) -> Factor:
    """The factor of a label; no letter for a text that is no label."""
    match = LABEL.fullmatch(label)
    return Factor(match[1], int(match[2] or 1), int(match[3] or 0)) if match else Factor("")


def axis_labels(text: str) -> Mapping[str, str]:
    """Label of a strategy on each axis: ``n`` on a single axis, ``tp0:n tp1:`` on several; none on other axes."""
    words = text.split()
    return dict(word.split(":") for word in words) if ":" in text else {TP: text}  # type: ignore[misc]


def label_text(labels: Mapping[str, str]) -> str:
    """The text of a strategy's labels by axis; inverse of `axis_labels`."""
    return labels[TP] if labels.keys() == {TP} else " ".join(f"{axis}:{label}" for axis, label in labels.items())


def factor_layout(rule: Rule, dims: Dims, factor: Factor, axis: str) -> Layout:
    """The layout of a tensor that has the factor's letter, split in that factor."""
    dim = next(i for i, letters in enumerate(dims) if factor.letter in letters)
    at = dims[dim].index(factor.letter)
    before, after = (prod(rule.sizes[x] for x in letters) for letters in (dims[dim][:at], dims[dim][at + 1 :]))
    return split_layout(dim, before * factor.parts, axis, factor.unit * after)


def strategies(
    rule: Rule, ranks: int, parts: Mapping[str, tuple[int, ...]], ragged: Collection[str] = (), axis: str = TP
) -> tuple[Strategy, ...]:
    """All strategies, the replicated one first, then those of each letter in order of appearance.

    Args:
        parts: numbers of parts to offer besides 1, for letters that are worth splitting other than contiguously.
        ragged: letters that are split raggedly where they do not divide evenly.
    """
    factors = [Factor(letter, n) for letter in rule.free for n in dict.fromkeys((1, *parts.get(letter, ())))]
    uneven = [f for f in factors if f.letter in ragged and not f.fits(rule.sizes[f.letter], ranks)]
    found = (strategy(rule, str(replace(f, unit=1) if f in uneven else f), ranks, axis) for f in factors)
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
    letters = dims[split.dim] if split.dim < len(dims) else ()
    before = 1
    for at, letter in enumerate(letters):
        until = before * rule.sizes[letter]
        if split.outer % before == 0 and split.unit:
            after = prod(rule.sizes[x] for x in letters[at + 1 :])
            factor = Factor(letter, split.outer // before, split.unit // max(1, after))
            if after and split.unit % after == 0 and factor.unit and factor.fits(rule.sizes[letter], ranks):
                return str(factor)
        elif split.outer % before == 0 and until % (split.outer * ranks) == 0:
            return str(Factor(letter, split.outer // before))
        before = until
    return None
