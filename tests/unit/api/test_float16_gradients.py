"""Gradients of small losses under fp16: the ranks scale them before they are rounded to float16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar


@pytest.mark.parametrize("factor", [1.0, 1e-7])
def test_gradients_of_a_small_loss_are_not_rounded_to_zero(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    F.cross_entropy(model(x), y).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    module, _ = autopar.prepare(model, optimizer, 1, example_inputs=x, precision="fp16", cost="analytic")
    output = module(x)
    assert output.dtype == torch.float32
    (F.cross_entropy(output, y) * factor).backward()
    assert module.clip_grad_norm_(1e9).item() / factor == pytest.approx(expected, rel=5e-3)
