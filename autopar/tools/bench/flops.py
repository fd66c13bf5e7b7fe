"""FLOPs of training on one image."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SAMPLES = 2  # batch norm refuses a batch of one


def flops_per_image(model: nn.Module, shape: tuple[int, ...]) -> float:
    """FLOPs of matrix products, convolutions and attention, forward and backward, without recomputation.

    Args:
        model: on the meta device.
        shape: of images, with any batch.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    with FlopCounterMode(display=False) as counter:
        model.train()(torch.empty(SAMPLES, *shape[1:], device="meta", dtype=dtype)).sum().backward()
    return counter.get_total_flops() / SAMPLES
