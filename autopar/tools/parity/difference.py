"""Distance between tensors, and its tolerance.

In a low precision the tolerance is measured by the result's distance to float32. Two correct computations (other order
of sums, other kernels) differ from each other about as much as each differs from float32. That distance depends on the
model: 0.5 % of the gradient of a ViT's weights, 20 % after the rectifiers and batch statistics of a ResNet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

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
        return gap / allowed if allowed and isfinite(allowed) else float("inf")


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


ABSOLUTE, RELATIVE = 1e-5, 1e-4
# Below this 2-norm, a tolerance of 1e-5 would hide a wrong tensor: it becomes 1e-4 of the norm, at least 1e-7.
SMALL_NORM, MIN_ABSOLUTE = 0.1, 1e-7
DOUBLE = 1e-4  # tolerances of float64 are smaller by this factor: below roundings of float32

Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """Comparison of one quantity.

    ``max_absolute`` is the largest difference of an element. ``max_relative`` is the largest quotient of a difference's
    2-norm and the expected tensor's 2-norm. ``worst`` names the tensor with the largest excess.
    """

    quantity: str
    num_tensors: int
    max_absolute: float
    max_relative: float
    bitwise: bool
    ok: bool
    worst: str


@dataclass(frozen=True)
class Difference:
    """Distance between two tensors. ``excess`` is the largest quotient of difference and tolerance: 1 is the limit."""

    absolute: float
    relative: float
    excess: float


def compared(
    quantity: str,
    actual: Named,
    expected: Named,
    exact: Named | None = None,
    rounding: Rounding = NO_ROUNDING,
    scale: float = 1.0,
    infinities: bool = False,
) -> Row:
    """Row of two lists of tensors; a name in only one list is a failure.

    Args:
        exact: in mixed precision, the expected tensors in float32.
        rounding: tolerance in addition to the expected tensor's distance to ``exact``.
        scale: factor of the tolerance of `difference`.
        infinities: whether infinities that both sides have, such as bounds in buffers, are equal.
    """
    ours, theirs = dict(actual), dict(expected)
    unmatched = [name for name in (*ours, *theirs) if name not in ours or name not in theirs]
    if unmatched:
        side = "the parallel model" if unmatched[0] in ours else "the model on one device"
        return Row(quantity, len(theirs), float("inf"), float("inf"), False, False, f"{unmatched[0]}: only in {side}")
    bitwise = all(same(ours[name], tensor) for name, tensor in theirs.items())
    if infinities:
        common = {n: t.isinf() & (t == ours[n]) for n, t in theirs.items() if ours[n].shape == t.shape}

        def without(side: Named) -> Named:
            return [(name, t.masked_fill(common[name], 0) if name in common else t) for name, t in side]

        ours, theirs, exact = dict(without(actual)), dict(without(expected)), without(exact or [])
    found = {name: difference(ours[name], tensor, scale) for name, tensor in theirs.items()}
    for name, tensor in exact or ():
        if isfinite(found[name].excess):  # of one shape and dtype, and finite
            wider = rounding.excess(ours[name], theirs[name], tensor)
            found[name] = replace(found[name], excess=min(found[name].excess, wider))
    worst = max(found, key=lambda name: found[name].excess, default="")
    return Row(
        quantity,
        len(found),
        max((d.absolute for d in found.values()), default=0.0),
        max((d.relative for d in found.values()), default=0.0),
        bitwise,
        all(d.excess <= 1 for d in found.values()),
        worst,
    )


def difference(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> Difference:
    """Distance of a tensor to the expected one; infinite if shape or dtype differ or a number is not finite.

    Tolerance: 1e-5 + 1e-4·|expected|. In place of 1e-5: where the expected tensor's root mean square is above 1, 1e-5
    of that; where its 2-norm is below 0.1, 1e-4 of the norm (at least 1e-7). All of this times ``scale``. Integers and
    booleans must be equal.
    """
    infinite = Difference(float("inf"), float("inf"), float("inf"))
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return infinite
    if not expected.numel() or (same(actual, expected) and bool(torch.isfinite(expected).all())):
        return Difference(0.0, 0.0, 0.0)
    if not (expected.is_floating_point() or expected.is_complex()):
        gap = (actual.double() - expected.double()).abs().max().item()
        return Difference(gap, float("inf"), float("inf"))
    ours, theirs = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (actual, expected))
    gap = (ours - theirs).abs()
    norm = theirs.norm().item()
    if not bool(torch.isfinite(gap).all()):
        return infinite
    rms = norm / theirs.numel() ** 0.5
    floor = ABSOLUTE * max(1.0, rms) if norm >= SMALL_NORM else max(MIN_ABSOLUTE, norm * ABSOLUTE / SMALL_NORM)
    relative = gap.norm().item() / norm if norm else float("inf")
    allowed = (floor + RELATIVE * theirs.abs()) * scale
    return Difference(gap.max().item(), relative, (gap / allowed).max().item())


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal, apart from the sign of zero."""
    return actual.dtype == expected.dtype and torch.equal(actual, expected)
