"""Operators on parts of pictures: results and gradients lie in memory as those without data say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rule_oracle import on_threads
from torch import Tensor

from autopar.ir.layout import TP
from autopar.ops.registry import operator

RANKS = 2
WEIGHT = torch.randn(8, 4, 3, 3)
CALLS: dict[str, tuple[Any, ...]] = {
    "halo_convolution": (WEIGHT, None, [1, 1], [1, 1], [1, 1], 1, 2, [1, 1], RANKS, TP),
    "halo_conv_transpose": (
        torch.randn(4, 8, 4, 4), None, [2, 2], [1, 1], [0, 0], [1, 1], 1, 2, [1, 1], RANKS, TP),
    "halo_max_pool": ([3, 3], [2, 2], [1, 1], [1, 1], False, 2, [1, 0], RANKS, TP),
    "halo_avg_pool": ([3, 3], [1, 1], [1, 1], False, None, 2, [1, 1], RANKS, TP),
    "halo_resize": ([16, 16], False, False, 16, 32, 8, 16, 2, [1, 1], RANKS, TP),
    "split_batch_norm": (torch.ones(4), torch.zeros(4), None, None, 0.1, 1e-5, RANKS, TP),
    "split_group_norm": (2, torch.ones(4), torch.zeros(4), 1e-5, RANKS, TP),
}  # fmt: skip


def run(name: str, arguments: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    made = operator(f"autopar.{name}.default")(x, *arguments)
    made.backward(torch.ones_like(made))
    assert x.grad is not None
    return made, x.grad


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CALLS)
def test_layouts_are_those_of_tensors_without_data(name: str, memory_format: torch.memory_format) -> None:
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=memory_format)
    runs = on_threads(lambda rank: run(name, CALLS[name], x.clone().requires_grad_()), RANKS, concurrent=True)
    arguments = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in CALLS[name])
    made, gradient = run(name, arguments, x.to("meta").requires_grad_())
    for found, found_gradient in runs:
        assert found.shape == made.shape
        assert found_gradient.stride() == gradient.stride()
        if name not in ("halo_convolution", "halo_conv_transpose"):  # the meta device forgets their format
            assert found.stride() == made.stride()
        elif memory_format == torch.channels_last:
            assert found.is_contiguous(memory_format=memory_format)
