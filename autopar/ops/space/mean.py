"""Means over dims of which each rank holds a part."""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define(
    "autopar::part_mean", "(Tensor x, int[] dim, bool keepdim, int count, ScalarType? dtype) -> Tensor"
)


@torch.library.impl("autopar::part_mean", "CompositeImplicitAutograd")
def part_mean(x: Tensor, dim: list[int], keepdim: bool, count: int, dtype: torch.dtype | None) -> Tensor:
    """This rank's summand of a mean over ``dim``.

    Args:
        count: elements of each mean, on all ranks together.
    """
    return torch.sum(x, dim, keepdim, dtype=dtype) / count
