"""Autocast regions on a GPU, whose lists of operations differ from the CPU's: against the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import effort
from torch import nn

import autopar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Region(nn.Module):
    """Layers without biases and a function of what they make, under autocast."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.norm, self.conv = nn.LayerNorm(32), nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.cell, self.function = nn.GRUCell(32, 32), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.function(self, x, self.second(F.gelu(self.first(x))))
        return y.float()


CASES: dict[str, Callable] = {
    "linear": lambda m, x, low: low,
    "matmul": lambda m, x, low: low @ x.t() @ x,
    "convolution": lambda m, x, low: m.conv(low[:, None]),
    "layer norm": lambda m, x, low: m.norm(low),
    "softmax": lambda m, x, low: low.softmax(-1),
    "sum": lambda m, x, low: low.sum(1),
    "cumsum": lambda m, x, low: low.cumsum(1),
    "norm": lambda m, x, low: F.normalize(low),
    "cat": lambda m, x, low: torch.cat([low, x]),
    "loss": lambda m, x, low: F.cross_entropy(low, low.argmax(1)),
    "cell": lambda m, x, low: m.cell(low, x),
    "in place": lambda m, x, low: low.add_(x),
}
# Autocast has these compute in float32, or not, by an argument; the trace casts their inputs, as torch.compile does.
# So some numbers are rounded to bfloat16 in the model that are not in the trace.
ROUNDED = ("loss", "cumsum")


@pytest.mark.parametrize("name", effort.only(["linear", "softmax", "in place"], CASES))
def test_gradients_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, x = Region(CASES[name]).cuda(), torch.randn(16, 32, device="cuda")
    twin = copy.deepcopy(model)
    with autopar.parallelize(
        model, 1, x, loss_fn=lambda output, _: output.square().mean(), microbatches=1, compile=False,
    ) as pm:  # fmt: skip
        found = pm.forward_backward(x, x).loss
        gradients = pm.gradients()
    loss = twin(x).square().mean()
    loss.backward()
    tolerance = 1e-2 if name in ROUNDED else 1e-6
    assert found == pytest.approx(loss.item(), rel=tolerance)
    for parameter, p in twin.named_parameters():
        if p.grad is not None:
            difference = gradients[parameter].to(p.device) - p.grad
            assert difference.norm() <= tolerance * p.grad.norm(), parameter
