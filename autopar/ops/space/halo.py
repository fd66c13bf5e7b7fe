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
def halo_rows_backward(gradient: Tensor, rows: int, dim: int, halo: Sequence[int], ranks: int, axis: str) -> Tensor:
    """The gradient of a part from the gradients of its rows at the neighbours; zeros for all other rows."""
    before, after = halo
    communicator = on(axis, ranks)
    rank = communicator.rank
    gathered = communicator.all_gather(gradient.contiguous())
    total = gradient.new_zeros([rows if i == dim else size for i, size in enumerate(gradient.shape)])
    if rank > 0:
        total.narrow(dim, 0, after).add_(gathered[rank - 1].narrow(dim, before, after))
    if rank < ranks - 1:
        total.narrow(dim, rows - before, before).add_(gathered[rank + 1].narrow(dim, 0, before))
    return total


@halo_rows.register_fake
def _rows(x: Tensor, dim: int, halo: Sequence[int], border: float, ranks: int, axis: str) -> Tensor:
    return empty_resized(x, {dim: sum(halo)})


@halo_rows_backward.register_fake
def _part(gradient: Tensor, rows: int, dim: int, halo: Sequence[int], ranks: int, axis: str) -> Tensor:
    return empty_resized(gradient, {dim: rows})


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.halo, _, ctx.ranks, ctx.axis = inputs
    ctx.rows = x.shape[ctx.dim]


def _return_rows(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return halo_rows_backward(gradient, ctx.rows, ctx.dim, ctx.halo, ctx.ranks, ctx.axis), *[None] * 5


halo_rows.register_autograd(_return_rows, setup_context=_keep_arguments)
