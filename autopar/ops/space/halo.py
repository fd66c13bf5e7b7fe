"""Rows next to a rank's part of a dim: the halo that windows over the border of the part read.

"Rows" are positions of the dim that is split, whichever it is. The rows travel by an all-gather of what each rank's
neighbours need. Sends between neighbours alone would move ``ranks / 2`` times fewer bytes. But a halo is a few rows of
hundreds, its exchange is mostly latency, and an all-gather cannot deadlock and is in every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.collectives import empty_resized, on
from autopar.ops.gradient_layout import CHANNELS_LAST


@torch.library.custom_op("autopar::halo_rows", mutates_args=())
def halo_rows(x: Tensor, dim: int, halo: Sequence[int], border: float, ranks: int, axis: str) -> Tensor:
    """The rows before and after this rank's part: [..., before + after, ...]; beyond the picture they are ``border``.

    Args:
        halo: numbers of rows before and after; no part has fewer rows than either.
    """
    before, after = halo
    communicator = on(axis, ranks)
    rank, rows = communicator.rank, x.shape[dim]
    sent = torch.cat([x.narrow(dim, 0, after), x.narrow(dim, rows - before, before)], dim)
    gathered = communicator.all_gather(sent.contiguous())
    border_rows = sent.new_full((), border).expand(sent.shape)
    above = gathered[rank - 1] if rank > 0 else border_rows
    below = gathered[rank + 1] if rank < ranks - 1 else border_rows
    return torch.cat([above.narrow(dim, after, before), below.narrow(dim, 0, after)], dim)


@torch.library.custom_op("autopar::halo_rows_backward", mutates_args=())
def halo_rows_backward(gradient: Tensor, dim: int, halo: Sequence[int], ranks: int, axis: str) -> Tensor:
    """Gradients that the neighbours have for a part's first ``after`` and last ``before`` rows, one after the other."""
    before, after = halo
    communicator = on(axis, ranks)
    rank = communicator.rank
    gathered = communicator.all_gather(gradient.contiguous())
    none = gradient.new_zeros(()).expand(gradient.shape)
    of_first = gathered[rank - 1] if rank > 0 else none
    of_last = gathered[rank + 1] if rank < ranks - 1 else none
    return torch.cat([of_first.narrow(dim, before, after), of_last.narrow(dim, 0, before)], dim)


@halo_rows.register_fake
def _rows(x: Tensor, dim: int, halo: Sequence[int], border: float, ranks: int, axis: str) -> Tensor:
    return empty_resized(x, {dim: sum(halo)})


@halo_rows_backward.register_fake
def _returned_rows(gradient: Tensor, dim: int, halo: Sequence[int], ranks: int, axis: str) -> Tensor:
    return empty_resized(gradient, {})


def add_halo_gradients(total: Tensor, of_halo: Tensor, dim: int, halo: Sequence[int], ranks: int, axis: str) -> None:
    """Add to a part's gradient those of its rows at the neighbours.

    Args:
        of_halo: gradients of the rows that this rank has of its neighbours, see `halo_rows`.
    """
    before, after = halo
    of_first, of_last = halo_rows_backward(of_halo, dim, halo, ranks, axis).split([after, before], dim)
    total.narrow(dim, 0, after).add_(of_first)
    total.narrow(dim, total.shape[dim] - before, before).add_(of_last)


def halo_like(x: Tensor, dim: int, halo: Sequence[int], border: float, ranks: int, axis: str) -> Tensor:
    """As `halo_rows`, in the memory format of ``x``: kernels and `torch.cat` go by the formats of all operands."""
    rows, last = halo_rows(x, dim, halo, border, ranks, axis), CHANNELS_LAST.get(x.dim())
    is_last = last is not None and x.is_contiguous(memory_format=last) and not x.is_contiguous()
    return rows.contiguous(memory_format=last) if last is not None and is_last else rows


def with_halo(x: Tensor, dim: int, halo: Sequence[int], ranks: int, axis: str) -> Tensor:
    """A part between the rows of its neighbours; zeros beyond the picture."""
    return _WithHalo.apply(x, dim, halo, ranks, axis)  # type: ignore[return-value]


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, halo: Sequence[int], ranks: int, axis: str) -> Tensor:
        ctx.where = dim, halo, ranks, axis
        above, below = halo_like(x, dim, halo, 0.0, ranks, axis).split(list(halo), dim)
        return torch.cat([above, x, below], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dim, (before, after), *_ = ctx.where
        above, inside, below = gradient.split([before, gradient.shape[dim] - before - after, after], dim)
        total = inside.clone()
        add_halo_gradients(total, torch.cat([above, below], dim), *ctx.where)
        return total, None, None, None, None
