"""How torch's allocator takes memory of a GPU from its driver."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # in which users set the allocator


def let_segments_grow(environ: Mapping[str, str] = os.environ) -> None:
    """Have the allocator take memory in segments that grow, unless the user has set it up.

    Gradients and the optimizer's state come into being among the first step's activations, and stay there. What lies
    between them in segments of fixed size is too small for the next step's: then steps of ViT and ResNet-50 with 4
    to 50 GB of tensors need 2 to 16 % more memory than that on an H200, torch 2.11, and 0.2 to 3 % with segments that
    grow (docs/benchmarks.md).

    The setter of these settings is private; there is no other than the variables, which are read before a program of
    the user's gets here.
    """
    if not any(environ.get(name) for name in VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
