"""Branches on whether activations are finite are traced as if all were, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar import AssumedFiniteWarning, TraceError
from autopar.trace.trace import trace

BRANCHES: dict[str, Callable[[Tensor], bool | Tensor]] = {
    "not torch.isfinite(x).all()": lambda x: not torch.isfinite(x).all(),
    "x.isnan().any() or x.isinf().any()": lambda x: x.isnan().any() or x.isinf().any(),
    "(~x.isfinite()).any().item()": lambda x: bool((~x.isfinite()).any().item()),
    "torch.isfinite(x).logical_not().any()": lambda x: torch.isfinite(x).logical_not().any(),
}


class Guarded(nn.Module):
    """Clamps or raises where values are not finite."""

    def __init__(self, is_bad: Callable[[Tensor], bool | Tensor], raises: bool = False) -> None:
        super().__init__()
        self.linear, self.is_bad, self.raises = nn.Linear(4, 4), is_bad, raises

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.is_bad(x):
            if self.raises:
                raise ValueError("not finite")
            x = x.clamp(-1e30, 1e30)
        return x.relu()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("text", BRANCHES)
def test_the_branch_for_finite_values_is_traced(text: str, raises: bool) -> None:
    with pytest.warns(
        AssumedFiniteWarning, match=r"Guarded branches on .* at .*test_finite.py:\d+, in (forward|<lambda>): "
    ) as seen:
        graph = trace(Guarded(BRANCHES[text], raises), (torch.randn(2, 4),), {})
    assert len(seen) == 1
    assert [op.target for op in graph.ops] == ["aten.linear.default", "aten.relu.default"]


def test_other_branches_on_values_are_refused() -> None:
    for is_bad in (lambda x: (x > 0).all(), lambda x: x.detach().isinf().any()):  # a mask may have infinite values
        with pytest.raises(TraceError, match="may not branch on tensor values"):
            trace(Guarded(is_bad), (torch.randn(2, 4),), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", AssumedFiniteWarning)
        trace(Guarded(lambda x: x.isfinite().ndim == 0), (torch.randn(2, 4),), {})
