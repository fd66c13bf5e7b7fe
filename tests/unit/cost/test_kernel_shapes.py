"""Slowdowns of library kernels by the shapes of their operands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.graphs import graph, op, parameter, value
from torch import nn

from autopar.api.planning.plan import example_call
from autopar.cost.groups.saved_activations import compiled_stats
from autopar.cost.hardware.load import load_hardware
from autopar.cost.ops.kernel_shapes import BACKWARD, FORWARD, group_padding, shape_slowdowns
from autopar.cost.ops.op_cost import Pricing, op_costs
from autopar.cost.ops.op_stats import ATTENTION, graph_stats
from autopar.ir.hardware import ExecutionMode
from autopar.trace.lower import lower_model
from autopar.trace.trace import trace

TRACES = Path(__file__).parents[3] / "docs" / "benchmarks"
# Kernels of one attention, of the forward and of the backward, with what cuDNN computes before and after it.
ATTENTION_KERNELS = ("flash_fprop", "flash_bprop|compute_dot_do_o|convert_dq")
SHAPES = {  # of training steps: batch, heads, tokens, head width
    "vit-base-32px": (256, 12, 5, 64),
    "vit-large": (128, 16, 197, 64),
    "eva02-base": (128, 12, 257, 64),
}


def measured_seconds(model: str, words: str) -> float:
    """Seconds of the kernels of one layer whose name holds one of some words."""
    kernels = json.loads((TRACES / f"h100-x1-kernels-{model}.json").read_text())["kernels"]
    chosen = [k for k in kernels if any(word in k["name"] for word in words.split("|"))]
    return sum(k["seconds"] / k["count"] for k in chosen)


@pytest.mark.parametrize("model", SHAPES)
def test_attention_of_a_step(model: str) -> None:
    h100 = load_hardware("h100-nvlink").with_mode(ExecutionMode(compiled=True, captured=True))
    batch, heads, tokens, width = SHAPES[model]
    flops, size = 4.0 * batch * heads * tokens**2 * width, 2 * batch * heads * tokens * width
    forward = h100.op_seconds("attention", FORWARD.padding(tokens, tokens, width) * flops, 4 * size, "bfloat16")
    backward = h100.op_seconds(
        "attention", BACKWARD.padding(tokens, tokens, width) * 2.5 * flops, 8 * size, "bfloat16", backward=True
    )
    measured = [measured_seconds(model, words) for words in ATTENTION_KERNELS]
    assert [forward, backward] == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("in_features", "out_features", "slowdown"),
    [(768, 3072, 1.0), (1152, 4304, 1.1), (196, 384, 2.7), (384, 196, 2.7), (8, 8, 1.1 * 64 * 224 / 64)],
)
def test_products_need_aligned_rows(in_features: int, out_features: int, slowdown: float) -> None:
    x, y = value("x", 128, in_features, dtype="bfloat16"), value("y", 128, out_features, dtype="bfloat16")
    layer = op("aten.linear.default", ("%x", "%w"), y)
    traced = graph((x,), (parameter("w", out_features, in_features),), layer)
    assert shape_slowdowns(layer, traced) == (slowdown, slowdown)


def test_a_classifier_of_few_rows_is_not_slower() -> None:
    layer = op("aten.linear.default", ("%x", "%w"), value("y", 8, 10))
    traced = graph((value("x", 8, 196),), (parameter("w", 10, 196),), layer)
    assert shape_slowdowns(layer, traced) == (1.0, 1.0)


def test_batched_products_take_whole_tiles() -> None:
    """Of windows of 49 tokens, rows of scores are not aligned either."""
    operands = value("q", 512, 16, 49, 32, dtype="bfloat16"), value("k", 512, 16, 32, 49, dtype="bfloat16")
    product = op("aten.matmul.default", ("%q", "%k"), value("scores", 512, 16, 49, 49, dtype="bfloat16"))
    tiles = 64 * 64 * (32 + 128) / (49 * 49 * 32)
    assert shape_slowdowns(product, graph(operands, (), product)) == pytest.approx((4 * tiles, 4 * tiles))


class Windows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_of_five_dims_takes_its_products_in_float32() -> None:
    """Windows of twins_svt_base: two products and a softmax take 107 us on an H200, and conversions come on top."""
    hardware = load_hardware("h200-nvlink").with_mode(ExecutionMode(True, True))
    windows = torch.randn(64, 4, 12, 49, 32, dtype=torch.bfloat16, requires_grad=True)
    costs = []
    for x in (windows, windows.detach().flatten(0, 1).requires_grad_()):
        graph = trace(Windows(), (x,))
        (name,) = (op.name for op in graph.ops if op.target == ATTENTION)
        costs.append(op_costs(Pricing(graph, graph_stats(graph, "cuda"), hardware, len(x)))[name])
    unfused, fused = costs
    assert 107e-6 < unfused.forward_seconds < 1.6 * 107e-6
    assert unfused.forward_seconds > 1.5 * fused.forward_seconds > 0


# Of a kernel over a large convolution of as many FLOPs, forward and backward: weight, stride, groups.
CONVOLUTIONS = {
    "aligned channels": ((64, 8, 3, 3), 1, 1, (1.0, 1.0)),
    "a stem": ((64, 3, 7, 7), 2, 1, (1.2 * 2080 / 147, 2.5 * 512 / 147)),
    "patches": ((64, 3, 16, 16), 16, 1, (1.0, 1.0)),
    "groups of four": ((64, 4, 3, 3), 1, 16, (16.0, 16.0)),
    "depthwise": ((64, 1, 3, 3), 1, 64, (1.0, 1.0)),
    "two filters a channel": ((64, 1, 3, 3), 1, 32, (1.0, 30.0)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_pad_channels_and_groups(case: str) -> None:
    weight, stride, groups, slowdowns = CONVOLUTIONS[case]
    x, y = (value(name, 2, n, 32, 32, dtype="bfloat16") for name, n in (("x", weight[1] * groups), ("y", weight[0])))
    layer = op("aten.conv2d.default", ("%x", "%w", None, [stride] * 2, [0, 0], [1, 1], groups), y)
    assert shape_slowdowns(layer, graph((x,), (parameter("w", *weight),), layer)) == pytest.approx(slowdowns)


@pytest.mark.parametrize(
    ("width", "dtype", "padding"),
    [
        ((24, 24), "bfloat16", (4 / 3, 4 / 3)),
        ((12, 40), "float16", (4 / 3, 8 / 5)),
        ((32, 24), "bfloat16", (1, 4 / 3)),
        ((24, 24), "float32", (1, 1)),
        ((300, 300), "bfloat16", (1, 1)),
        ((1, 3), "bfloat16", (1, 1)),
    ],
)
def test_compiled_code_pads_groups(width: tuple[int, int], dtype: str, padding: tuple[float, float]) -> None:
    """Their FLOPs are those of the padded groups, computed in tiles as others are."""
    x, y = (value(name, 2, 4 * n, 32, 32, dtype=dtype) for name, n in zip("xy", width))
    layer = op("aten.conv2d.default", ("%x", "%w", None, [1, 1], [0, 0], [1, 1], 4), y)
    traced = graph((x,), (parameter("w", 4 * width[1], width[0], 3, 3),), layer)
    assert group_padding(layer, traced) == pytest.approx(padding)
    if min(width) > 1:
        tiles = (max(1, 64 / n) for n in (padding[0] * width[0], width[0]))
        flops = padding[0] * padding[1] * next(tiles), next(tiles)
        assert [shape_slowdowns(layer, traced, on)[0] for on in (True, False)] == pytest.approx(flops)


class Grouped(nn.Module):
    """The convolutions of a block of RegNet."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))


def test_groups_of_24_cost_what_groups_of_32_do() -> None:
    """Measured on an H200 (bfloat16, 128 images of 28 by 28): 80 us forward and 149 backward for 8 groups of 32, 621
    and 1,165 for 10 groups of 24 without padding. Here 10 groups of 32 take 5 / 4 of what 8 take."""
    hardware = load_hardware("h200-nvlink").with_mode(ExecutionMode(True, True))
    costs, libraries = [], []
    for channels in (240, 320):
        with torch.device("meta"):
            model, x = Grouped(channels, 10), torch.empty(128, channels, 28, 28).to(memory_format=torch.channels_last)
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        traced = lower_model(model, example_call(model, x, None, None), "train", "net", "bf16")
        stats = compiled_stats(traced, graph_stats(traced, "cuda"), "cuda")
        for into, used in ((costs, stats), (libraries, replace(stats, traffic={}))):
            cost = op_costs(Pricing(traced, used, hardware, 128))["conv2.conv2d"]
            into.append((cost.forward_seconds, cost.backward_seconds))
    assert libraries[0] == pytest.approx(libraries[1], rel=0.01)
    padded, wide = costs
    assert all(low < high < low + 25e-6 for low, high in zip(wide, padded, strict=True))  # pads, and cuts
    assert padded == pytest.approx((1.25 * 80e-6, 1.25 * 149e-6), rel=0.3)
