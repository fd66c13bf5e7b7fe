"""The torch operators behind the targets that operations name: ATen's and those of `autopar.collectives`."""

from __future__ import annotations

import functools
from typing import Any

import torch

import autopar.collectives
import autopar.counter_random  # noqa: F401  (both define operators of torch.ops.autopar)


@functools.cache
def operator(target: str) -> Any:
    """The operator behind ``namespace.name.overload``: ``aten.linear.default``, ``autopar.all_reduce.default``."""
    return functools.reduce(getattr, target.split("."), torch.ops)
