"""What operations read a second time, counted by hand, and what a step of a GPU then takes beside what it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.graphs import MACHINE
from torch import nn

from autopar.cost.ops.op_cost import SPLIT_START_SECONDS, Pricing, op_costs
from autopar.cost.ops.op_stats import graph_stats
from autopar.ir.hardware import ExecutionMode, Hardware
from autopar.trace.trace import trace

X = 4 * 2 * 6 * 8 * 8  # bytes of an image
FREE = replace(MACHINE, peak_flops=dict.fromkeys(MACHINE.peak_flops, 1e30))
CUDA = replace(FREE, device_type="cuda")


class Scaled(nn.Module):
    """LayerScale: a factor for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


def layer_norm(affine: bool = True) -> nn.Module:
    return nn.LayerNorm([6, 8, 8], elementwise_affine=affine)


def batch_norm(training: bool) -> nn.Module:
    return nn.BatchNorm2d(6).train(training)


SPLIT = SPLIT_START_SECONDS * 1e9  # bytes that take as long
# What is added to one pass over operands, results and gradients, forwards and backwards, byte.
CASES: dict[str, tuple[Callable[[], nn.Module], Hardware, float, float]] = {
    "layer norm on a GPU": (layer_norm, CUDA, 0, 2 * X),
    "layer norm on CPU": (layer_norm, FREE, 0, 0),
    "layer norm without weights": (lambda: layer_norm(False), CUDA, 0, 0),
    "batch norm": (lambda: batch_norm(True), CUDA, X, 2 * X),
    "batch norm that is told its statistics": (lambda: batch_norm(False), CUDA, 0, X),
    "batch norm on CPU": (lambda: batch_norm(True), FREE, X, 2 * X),
    "group norm": (lambda: nn.GroupNorm(2, 6), CUDA, X, 2 * X),
    "layer scale": (Scaled, CUDA, 0, X),
    "convolution": (lambda: nn.Conv2d(6, 6, 3, padding=1, bias=False), CUDA, 0, X + SPLIT),
    "convolution with a bias": (lambda: nn.Conv2d(6, 6, 3, padding=1), CUDA, 0, 2 * X + SPLIT),
    "gelu": (nn.GELU, CUDA, 0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_again(case: str) -> None:
    make, machine, forward, backward = CASES[case]
    model = nn.Sequential(nn.Identity(), Scaled(), make())  # the scale makes a gradient arrive
    graph = trace(model, (torch.randn(2, 6, 8, 8),))
    op = graph.ops[-1]
    pricing = Pricing(graph, graph_stats(graph), machine, 2)
    (found,) = (cost for name, cost in op_costs(pricing).items() if name == op.name)
    facts = pricing.stats.ops[op.name]
    once = [pricing.num_bytes(name) for name in (*op.reads, op.outputs[0].name)]
    arriving = pricing.num_bytes(op.outputs[0].name)
    written = sum(pricing.num_bytes(op.reads[i]) for i in facts.gradients)
    kept = facts.saved_bytes + sum(map(pricing.num_bytes, facts.saved_names(op)))
    sums = sum(3 * w.num_bytes for w in graph.weights if w.name in op.reads and len(w.shape) > 1)
    assert found.forward_seconds == pytest.approx((sum(once) + forward) * 1e-9)
    assert found.backward_seconds == pytest.approx((arriving + written + kept + backward + sums) * 1e-9)


@pytest.mark.parametrize(
    "way",
    [ExecutionMode(), ExecutionMode(compiled=True), ExecutionMode(captured=True), ExecutionMode(True, True)],
    ids=str,
)
def test_gradients_are_added_to_sums(way: ExecutionMode) -> None:
    """A compiled linear layer adds in its product, which reads the sum alone. In bfloat16 and float32."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    graph = trace(model, (torch.randn(4, 8),))
    low = replace(graph, weights=tuple(replace(w, dtype="bfloat16", master="float32") for w in graph.weights))
    moved = [
        op_costs(Pricing(found, graph_stats(graph), FREE.with_mode(way), 4))["1.linear"].backward_seconds * 1e9
        for found in (graph, low)
    ]
    num, own = 16 * 8, 4 * 4 * (2 * 8 + 2 * 16)  # weights; gradients of y, for two products, and of x, and x
    added = (4, 4) if way.compiled else (2 * 4 + 4, 2 * 4 + 2)
    assert moved[0] == pytest.approx(own + (2 * 4 + added[0]) * num, rel=1e-6)
    assert moved[1] == pytest.approx(own + (2 * 2 + added[1]) * num, rel=1e-6)
