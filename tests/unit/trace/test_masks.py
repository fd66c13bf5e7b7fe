"""Attention masks made of constants: left out where they hide nothing, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.trace.trace import trace


class Masked(nn.Module):
    """Attention under a mask that is made of constants, or nearly."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.proj = kind, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.proj(x)[:, None]
        mask = torch.arange(4, device=x.device)[None, None, None, :] >= (1 if self.kind == "hides one" else 0)
        mask = mask.expand(len(x), 1, 4, 4)
        if self.kind == "written":
            mask = torch.ones(4, 4, dtype=torch.bool, device=x.device)
            mask[:, 2] = False
        elif self.kind == "data":
            mask = mask & (x.abs().amax() < 1e3)
        elif self.kind == "drawn":
            mask = mask & (torch.rand(4, 4, device=x.device) < 0.9)
        return F.scaled_dot_product_attention(keys, keys, keys, attn_mask=mask)


@pytest.mark.parametrize("kind", ["open", "hides one", "written", "data", "drawn"])
def test_a_mask_that_hides_nothing_is_left_out(kind: str) -> None:
    graph = trace(Masked(kind), (torch.randn(2, 4, 8),))
    attention = next(op for op in graph.ops if "attention" in op.target)
    assert (attention.args[3] is None) == (kind == "open")
    assert any("arange" in op.target for op in graph.ops) == (kind not in ("open", "written"))
