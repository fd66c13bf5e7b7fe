"""Linear and cubic interpolation of a part of a picture: a rank's rows, from its rows and those of its neighbours."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.layout import part_of
from autopar.ops.collectives import on
from autopar.ops.space.halo import with_halo

CUBIC = -0.75  # torch's coefficient of cubic convolution
# Mode by the number of dims that are resized, and whether it is cubic.
MODES = {(2, False): "bilinear", (3, False): "trilinear", (2, True): "bicubic"}
REACH = {False: 1, True: 2}  # rows on either side of a position that linear and cubic interpolation read

torch.library.define(
    "autopar::halo_resize",
    "(Tensor x, int[] size, bool align_corners, bool cubic, int whole_in, int whole_out, int unit_in, int unit_out, "
    "int dim, int[] halo, int ranks, str axis) -> Tensor",
)


@torch.library.impl("autopar::halo_resize", "CompositeImplicitAutograd")
def halo_resize(
    x: Tensor, size: list[int], align_corners: bool, cubic: bool, whole_in: int, whole_out: int, unit_in: int,
    unit_out: int, dim: int, halo: list[int], ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """A rank's part of an interpolated picture, of which ``x`` [N, C, …] is its part.

    Args:
        size: this rank's rows and the size of the other dims, as of `torch.nn.functional.interpolate`.
        whole_in, whole_out: rows of both pictures.
        unit_in, unit_out: rows that ranks share out together: ``whole_in / unit_in`` units of both pictures.
    """
    extended = with_halo(x, dim, halo, ranks, axis)
    spatial = dim - x.dim() + len(size)
    others = [extended.shape[dim] if i == spatial else wanted for i, wanted in enumerate(size)]
    if list(extended.shape[2:]) != others:
        mode = MODES[len(size), cubic]
        extended = F.interpolate(extended, others, mode=mode, align_corners=align_corners)
    whole, units = [whole_in, whole_out], [unit_in, unit_out]
    positions, shares = interpolated_rows(
        x.detach(), size[spatial], align_corners, cubic, whole, units, halo[0], ranks, axis
    )
    along = [-1 if i == dim else 1 for i in range(x.dim())]
    taps = [
        extended.index_select(dim, position) * share.view(along)
        for position, share in zip(positions.unbind(), shares.unbind())
    ]
    return functools.reduce(torch.add, taps).to(x.dtype)


@torch.library.custom_op("autopar::interpolated_rows", mutates_args=())
def interpolated_rows(
    x: Tensor, rows: int, align_corners: bool, cubic: bool, whole: Sequence[int], units: Sequence[int], before: int,
    ranks: int, axis: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """For each of a rank's ``rows``, the rows of its extended part that it is a sum of, and their shares: [taps, rows].

    Args:
        whole, units: rows of the pictures before and after, see `halo_resize`.
        before: rows before the part.
    """
    rank, wide = on(axis, ranks).rank, torch.promote_types(x.dtype, torch.float32)
    first_in, made = (part_of(size, unit, ranks, rank) for size, unit in zip(whole, units, strict=True))
    assert len(made) == rows, f"a program for {rows} rows on a rank of {len(made)}"
    at = torch.arange(made.start, made.stop, dtype=wide, device=x.device)
    if align_corners:
        source = at * ((whole[0] - 1) / max(1, whole[1] - 1))
    else:
        source = (at + 0.5) * (whole[0] / whole[1]) - 0.5
        source = source if cubic else source.clamp(min=0)
    floor = source.floor()
    share = source - floor
    taps = torch.arange(1 - REACH[cubic], 1 + REACH[cubic], device=x.device)
    positions = (floor.long() + taps[:, None]).clamp(0, whole[0] - 1) - (first_in.start - before)
    shares = cubic_shares(share) if cubic else torch.stack([1 - share, share])
    return positions, shares


def cubic_shares(share: Tensor) -> Tensor:
    """Shares of the four rows around a position that lies ``share`` after the second: cubic convolution."""

    def near(distance: Tensor) -> Tensor:
        return ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1

    def far(distance: Tensor) -> Tensor:
        return ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC

    return torch.stack([far(share + 1), near(share), near(1 - share), far(2 - share)])


@interpolated_rows.register_fake
def _rows(
    x: Tensor, rows: int, align_corners: bool, cubic: bool, whole: Sequence[int], units: Sequence[int], before: int,
    ranks: int, axis: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    taps = 2 * REACH[cubic]
    return (
        x.new_empty([taps, rows], dtype=torch.int64),
        x.new_empty([taps, rows], dtype=torch.promote_types(x.dtype, torch.float32)),
    )
