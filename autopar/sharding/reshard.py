"""The collectives that bring a tensor from the layout of its producer into the layout of a reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Op
from autopar.ir.layout import REPLICATED, Layout, Split, broadcast_layout, partial_layout
from autopar.ir.network import CollectiveKind

# Operator of `autopar.ops.collectives` -> collective for the tensor, for its gradient, and for a partial gradient.
COLLECTIVES: dict[str, tuple[CollectiveKind | None, CollectiveKind | None, CollectiveKind | None]] = {
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
class ReshardStep:
    """One operator of `autopar.ops.collectives`; it is called with the tensor and then ``args``.

    Args:
        ragged: whether ranks have parts of different sizes; the operator is then told this rank's.
    """

    name: str
    args: tuple[Any, ...]
    ragged: bool = False

    @property
    def forward(self) -> CollectiveKind | None:
        """The collective for the tensor; None where there is none."""
        return COLLECTIVES[self.name][0]

    @property
    def backward(self) -> CollectiveKind | None:
        """The collective for the gradient; None where there is none."""
        return COLLECTIVES[self.name][2 if self.args[-1] is True else 1]


def reshard_step(op: Op) -> ReshardStep | None:
    """The step that an operation is; None for operations that are no resharding."""
    namespace, name, *_ = op.target.split(".")
    if namespace != "autopar" or name not in COLLECTIVES:
        return None
    return ReshardStep(name, op.args[1:], bool(op.kwargs))


def reshard_steps(made: Layout, read: Layout, axis: str, ranks: int) -> tuple[ReshardStep, ...]:
    """The steps from one layout into another on one axis, in order; none where the layouts are equal.

    Without a single step there are two, and the first one gives a replicated tensor.

    Args:
        made, read: layouts on this axis alone.
        ranks: number of ranks on the axis.
    """
    assert made.axes | read.axes <= {axis}, f"{made} → {read} is not on {axis} alone"
    if made == read:
        return ()
    direct = single_step(made, read, axis, ranks)
    if direct is not None:
        return (direct,)
    apart, together = single_step(made, REPLICATED, axis, ranks), single_step(REPLICATED, read, axis, ranks)
    assert apart is not None and together is not None, f"no way from {made} to {read}"
    return (apart, together)


def single_step(made: Layout, read: Layout, axis: str, ranks: int) -> ReshardStep | None:
    """The single step from one layout into another; None where there is none."""
    from_sum, to_sum = made == partial_layout(axis), read == partial_layout(axis)
    from_copies, to_copies = made == broadcast_layout(axis), read == broadcast_layout(axis)
    source, target = split_of(made), split_of(read)
    if made == REPLICATED and target:
        return ReshardStep("shard", (*split_args(target), ranks, axis, False), read.ragged)
    if made == REPLICATED and to_copies:
        return ReshardStep("sum_gradient", (axis,))
    if made == REPLICATED and to_sum:
        return ReshardStep("first_rank", (axis,))
    if from_sum and read == REPLICATED:
        return ReshardStep("all_reduce", (axis,))
    if from_sum and target:
        return ReshardStep("reduce_scatter", (*split_args(target), ranks, axis), read.ragged)
    if source and read == REPLICATED:
        return ReshardStep("all_gather", (*split_args(source), ranks, axis, False), made.ragged)
    if source and to_copies:
        return ReshardStep("all_gather", (*split_args(source), ranks, axis, True), made.ragged)
    if source and target and source.dim != target.dim:
        both = (*split_args(source), *split_args(target))
        return ReshardStep("all_to_all", (*both, ranks, axis), made.ragged or read.ragged)
    if from_copies and read == REPLICATED:
        return ReshardStep("share_gradient", (ranks,))
    if from_copies and target:
        return ReshardStep("shard", (*split_args(target), ranks, axis, True), read.ragged)
    return None


def split_of(layout: Layout) -> Split | None:
    """The split of a layout; None where it is not split."""
    return layout.splits[0] if layout.splits else None


def split_args(split: Split) -> tuple[int, int]:
    """Arguments of a collective for a split: dim and outer."""
    return split.dim, split.outer
