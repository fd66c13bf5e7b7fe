"""Weights that overlap in memory: refused by both names, unless they are one tensor or apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.traced import Body, X
from torch import nn

from autopar.errors import TraceError
from autopar.trace.call import as_call
from autopar.trace.lower import lower_model


def lower(change: Callable[[Body], object], forward: Callable = lambda self, x: self.norm(self.lin(x))) -> None:
    model = Body(forward, norm=nn.Linear(4, 4))
    change(model)
    for precision in (None, "bf16-params"):  # which traces a copy
        lower_model(model, as_call(model, X), "train", "", precision)


def reads(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * self.w.sum()  # type: ignore[operator, union-attr]


def parts(model: Body, dim: int) -> None:
    """Both weights become halves of one tensor."""
    fused = torch.randn(8, 4) if dim == 0 else torch.randn(4, 8)
    model.lin.weight, model.norm.weight = map(nn.Parameter, fused.chunk(2, dim))  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.norm, "weight", nn.Parameter(m.lin.weight.detach().t())), "lin.weight .* and norm.weight"),
        (lambda m: m.register_buffer("w", m.lin.weight.detach()), r"lin\.weight \[4, 4\] and w \[4, 4\] share memory"),
        (lambda m: m.register_buffer("w", m.lin.weight.detach()[2]), r"lin\.weight \[4, 4\] and w \[4\] share memory"),
        (lambda m: m.register_buffer("w", m.lin.weight.detach().view(torch.int16)), r"and w \[4, 8\] share memory"),
        (
            lambda m: setattr(m, "w", m.lin.weight.detach()),
            r"weight \[4, 4\] and w .* would not reach w\. Use one",
        ),
    ],
    ids=["transposed", "buffer", "row", "other dtype", "attribute"],
)
def test_a_trainable_weight_may_not_overlap_with_another(change: Callable[[Body], object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        lower(change, reads if "and w" in message else lambda self, x: self.norm(self.lin(x)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.norm, "weight", m.lin.weight),
        lambda m: parts(m, 0),
        lambda m: parts(m, 1),
        lambda m: (m.requires_grad_(False), m.register_buffer("w", m.lin.weight.detach())),
        lambda m: m.register_buffer("w", m.lin.weight.detach()[:0]),
        lambda m: (m.register_buffer("w", m.lin.weight.detach()), m.to("meta")),
    ],
    ids=["one tensor", "rows", "columns", "frozen", "empty", "meta"],
)
def test_weights_that_share_no_trained_memory_are_taken(change: Callable[[Body], object]) -> None:
    lower(change)
