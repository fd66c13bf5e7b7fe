"""Tolerance for rounding in a low precision, measured by the result's distance to float32.

Two correct computations in a low precision (other order of sums, other kernels) differ from each other about as much as
each differs from float32. That distance depends on the model: 0.5 % of the gradient of a ViT's weights, 20 % after the
rectifiers and batch statistics of a ResNet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of one rounding
TIMES = 3.0  # allowed multiple of the distance to float32
OPERATIONS = 4  # roundings of the result that are always allowed, for results near float32 by chance


@dataclass(frozen=True)
class Rounding:
    """Allowed difference in addition to the noise.

    ``relative`` is a share of the result's 2-norm, ``absolute`` a root mean square per element, ``single`` a difference
    in one element.
    """

    relative: float = 0.0
    absolute: float = 0.0
    single: float = 0.0

    def excess(self, actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> float:
        """Quotient of a difference's 2-norm and the allowed 2-norm; 1 is the limit.

        Args:
            exact: the expected tensor in float32. All three tensors have one shape.
        """
        actual, expected, exact = actual.double(), expected.double(), exact.double()
        gap, noise = (actual - expected).norm().item(), (expected - exact).norm().item()
        fixed = self.relative * expected.norm().item() + self.absolute * expected.numel() ** 0.5 + self.single
        allowed = TIMES * noise + fixed
        return gap / allowed if allowed else float("inf")


NO_ROUNDING = Rounding()


def rounding_of(low: str | None) -> Rounding:
    """Rounding of a network's results in a low precision; none for None."""
    return Rounding(OPERATIONS * UNIT[low]) if low else NO_ROUNDING


def update_rounding(low: str | None, distance: float) -> Rounding:
    """Rounding of weights that updates have moved by up to ``distance`` each; it does not depend on the weights' size.

    AdamW moves a weight mainly by its gradient's sign. Where rounding decides that sign, a weight moves in the opposite
    direction. In a small tensor the distance to float32 may then be small by chance.
    """
    return Rounding(absolute=OPERATIONS * UNIT[low] * distance, single=2 * distance) if low else NO_ROUNDING
