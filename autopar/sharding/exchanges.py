"""Collectives inside of operations whose height or width is split: halos of windows, and moments of norms.

Other collectives are operations of their own, between two layouts of a tensor (`autopar.sharding.reshard`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import DTYPE_BYTES, Op, Value
from autopar.ir.network import CollectiveKind
from autopar.ops.space.norms import MOMENTS
from autopar.ops.space.windows import window_strips

HALOS = frozenset(
    f"autopar.halo_{name}.default" for name in ("convolution", "conv_transpose", "max_pool", "avg_pool", "resize")
)
GROUP_NORM = "autopar.split_group_norm.default"
NORMS = frozenset((GROUP_NORM, "autopar.split_batch_norm.default"))
EXCHANGING = HALOS | NORMS
# Operators of `autopar.ops.space`, whose kernels torch.compile does not fuse with others.
UNFUSED = EXCHANGING | {"autopar.part_mean.default"}
WINDOWS = frozenset(f"autopar.halo_{name}.default" for name in ("convolution", "max_pool", "avg_pool"))
SUMS = 2  # of a norm's backward


@dataclass(frozen=True)
class Exchange:
    """One collective inside of an operation.

    Args:
        numel, itemsize: elements of the unsharded tensor, and bytes of each.
    """

    kind: CollectiveKind
    numel: int
    itemsize: int
    is_backward: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the unsharded tensor, byte."""
        return self.numel * self.itemsize


def exchanges(op: Op, part: Value) -> Iterator[Exchange]:
    """The collectives of an operation of a rank, forward and then backward; none for most operations.

    Args:
        part: the rank's part of the operation's first operand.
    """
    if op.target in HALOS:
        dim, halo, ranks, _ = op.args[-4:]
        rows = prod(part.shape) // part.shape[dim] * sum(halo)
        yield Exchange("all-gather", ranks * rows, DTYPE_BYTES[part.dtype])
        if part.requires_grad:
            yield Exchange("all-gather", ranks * rows, DTYPE_BYTES[part.dtype], is_backward=True)
    elif op.target in NORMS:
        ranks, itemsize = op.args[-2], max(4, DTYPE_BYTES[part.dtype])
        sets = op.args[1] * part.shape[0] if op.target == GROUP_NORM else part.shape[1]
        yield Exchange("all-gather", ranks * MOMENTS * sets, itemsize)
        if op.outputs[0].requires_grad:
            yield Exchange("all-reduce", SUMS * sets, itemsize, is_backward=True)


def saved_strip_bytes(op: Op, part: Value) -> int:
    """Bytes that windows over the border of a part save besides the part; arguments as of `exchanges`."""
    if op.target not in HALOS or not op.outputs[0].requires_grad:
        return 0
    dim, (before, after), *_ = op.args[-4:]
    row_bytes = prod(part.shape) // part.shape[dim] * DTYPE_BYTES[part.dtype]
    if op.target in WINDOWS:
        return row_bytes * sum(map(len, border_strips(op, part)))
    return row_bytes * (before + part.shape[dim] + after) if "conv" in op.target else 0


def border_strips(op: Op, part: Value) -> list[range]:
    """Strips of rows that windows over the ends of a part read; arguments as of `exchanges`."""
    if op.target not in WINDOWS:
        return []
    dim, (before, after), *_ = op.args[-4:]
    rows, stride = part.shape[dim], part.shape[dim] // op.outputs[0].shape[dim]
    strips = window_strips(rows, before, stride + before + after, stride)
    return [strip for strip in strips if strip.start < 0 or strip.stop > rows]
