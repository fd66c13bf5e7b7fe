"""The layout of a value's gradient, where a compiled region would return another one than its reader takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dims


class _GradientLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channels_last: bool) -> Tensor:
        ctx.format = CHANNELS_LAST[x.dim()] if channels_last else torch.contiguous_format
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.contiguous(memory_format=ctx.format), None


torch.library.define("autopar::gradient_layout", "(Tensor x, bool channels_last) -> Tensor")


@torch.library.impl("autopar::gradient_layout", "CompositeImplicitAutograd")
def gradient_layout(x: Tensor, channels_last: bool) -> Tensor:
    """x itself; its gradient is made contiguous, or channels last."""
    return _GradientLayout.apply(x, channels_last)  # type: ignore[return-value]
