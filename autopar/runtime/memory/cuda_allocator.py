"""Settings of torch's CUDA caching allocator."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # by which users configure the allocator


def let_segments_grow(environ: Mapping[str, str] = os.environ) -> None:
    """Set the allocator to expandable segments, unless the user has configured it.

    Gradients and optimizer state are allocated among the first step's activations, and they stay. In segments of fixed
    size, the gaps between them are too small for the next step's activations. Then steps of ViT and ResNet-50 with 4 to
    50 GB of tensors need 2 to 16 % more memory than their tensors on an H200, torch 2.11. With expandable segments they
    need 0.2 to 3 % more (docs/benchmarks.md).

    The setter is private. The public way is the variables, which torch reads before the user's program calls autopar.
    """
    if not any(environ.get(name) for name in VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
