"""The collectives that bring a tensor from the layout in which it is made into the one in which it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, Layout, Split, broadcast_layout, partial_layout

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]


# Operator of `autopar.ops.collectives` -> what it communicates for the tensor, what for its gradient, and what for that
# if the gradient is partial.
SENDS: dict[str, tuple[Kind | None, Kind | None, Kind | None]] = {
    "all_reduce": ("all-reduce", None, None),
    "reduce_scatter": ("reduce-scatter", "all-gather", "all-gather"),
    "all_gather": ("all-gather", None, "reduce-scatter"),
    "all_to_all": ("all-to-all", "all-to-all", "all-to-all"),
    "shard": (None, "all-gather", None),
    "sum_gradient": (None, "all-reduce", "all-reduce"),
    "share_gradient": (None, None, None),
    "first_rank": (None, None, None),
}


@dataclass(frozen=True)
class Step:
    """One operator of `autopar.ops.collectives`, to be called with the tensor and then ``args``."""

    name: str
    args: tuple[Any, ...]

    @property
    def forward(self) -> Kind | None:
        """What it communicates for the tensor; None for nothing."""
        return SENDS[self.name][0]

    @property
    def backward(self) -> Kind | None:
        """What it communicates for the gradient; None for nothing."""
        return SENDS[self.name][2 if self.args[-1] is True else 1]


def step_of(op: Op) -> Step | None:
    """The step that an operation is; None of others than conversions."""
    namespace, name, *_ = op.target.split(".")
    return Step(name, op.args[1:]) if namespace == "autopar" and name in SENDS else None


def steps(made: Layout, read: Layout, axis: str, ranks: int) -> tuple[Step, ...]:
    """The steps from one layout into another on one axis, in order; none where the layouts are equal.

    Where no single step will do there are two, and the first one makes a replicated tensor.

    Args:
        axis: both layouts lie on this axis alone.
        ranks: number of ranks on the axis.
    """
    assert made.on(axis) == made and read.on(axis) == read, f"{made} → {read} is not on {axis} alone"
    if made == read:
        return ()
    direct = step(made, read, axis, ranks)
    if direct is not None:
        return (direct,)
    apart, together = step(made, REPLICATED, axis, ranks), step(REPLICATED, read, axis, ranks)
    assert apart is not None and together is not None, f"no way from {made} to {read}"
    return (apart, together)


def step(made: Layout, read: Layout, axis: str, ranks: int) -> Step | None:
    """The single step from one layout into another; None where there is none."""
    from_sum, to_sum = made == partial_layout(axis), read == partial_layout(axis)
    from_copies, to_copies = made == broadcast_layout(axis), read == broadcast_layout(axis)
    source, target = split_of(made), split_of(read)
    if made == REPLICATED and target:
        return Step("shard", (*where(target), ranks, axis, False))
    if made == REPLICATED and to_copies:
        return Step("sum_gradient", (axis,))
    if made == REPLICATED and to_sum:
        return Step("first_rank", (axis,))
    if from_sum and read == REPLICATED:
        return Step("all_reduce", (axis,))
    if from_sum and target:
        return Step("reduce_scatter", (*where(target), ranks, axis))
    if source and read == REPLICATED:
        return Step("all_gather", (*where(source), ranks, axis, False))
    if source and to_copies:
        return Step("all_gather", (*where(source), ranks, axis, True))
    if source and target and source.dim != target.dim:
        both = (*where(source), *where(target))
        return Step("all_to_all", (*both, ranks, axis))
    if from_copies and read == REPLICATED:
        return Step("share_gradient", (ranks,))
    if from_copies and target:
        return Step("shard", (*where(target), ranks, axis, True))
    return None


def split_of(layout: Layout) -> Split | None:
    """The split of a layout; None where it is not split."""
    return layout.splits[0] if layout.splits else None


def where(split: Split) -> tuple[int, int]:
    """Where a tensor is split, as the collectives take it."""
    return split.dim, split.outer
