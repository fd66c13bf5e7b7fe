"""What the rounding of a low precision may do to a result: measured by how far it leads away from float32.

Two right ways of computing in a low precision (sums in another order, other kernels) differ about as much from each
other as each does from float32, and how much that is depends on the model: 0.5 % of the gradient of a ViT's weights,
20 % behind the rectifiers and batch statistics of a ResNet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of one rounding
TIMES = 3.0  # the distance to float32
OPERATIONS = 4  # roundings of the result itself, for those that come near float32 by chance


@dataclass(frozen=True)
class Rounding:
    """What a result may be off beside the noise: relative to its 2-norm, per element (root mean square), and in one
    element."""

    relative: float = 0.0
    absolute: float = 0.0
    single: float = 0.0

    def excess(self, actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> float:
        """The 2-norm of a difference over what it may be; 1 is the limit.

        Args:
            exact: what is expected, in float32.
        """
        actual, expected, exact = actual.double(), expected.double(), exact.double()
        gap, noise = (actual - expected).norm().item(), (expected - exact).norm().item()
        own = self.relative * expected.norm().item() + self.absolute * expected.numel() ** 0.5 + self.single
        allowed = TIMES * noise + own
        return gap / allowed if allowed else float("inf")


NO_ROUNDING = Rounding()


def rounding_of(low: str | None) -> Rounding:
    """That of what a network computes in a low precision; none without."""
    return Rounding(OPERATIONS * UNIT[low]) if low else NO_ROUNDING


def update_rounding(low: str | None, distance: float) -> Rounding:
    """That of weights that updates have moved by up to a distance each; their own size says nothing of it.

    AdamW moves by a gradient's sign above all. Where rounding decides that sign a weight goes the other way, and if it
    is one of a small tensor the distance to float32 may be small by chance.
    """
    return Rounding(absolute=OPERATIONS * UNIT[low] * distance, single=2 * distance) if low else NO_ROUNDING
