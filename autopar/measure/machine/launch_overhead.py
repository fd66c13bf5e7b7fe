"""Seconds that an operation takes without any work: launched eagerly, from a compiled region, or from a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.measure.timer import Timing, time_captured, time_eager

CHAIN_OPS = 64  # consecutive operations of one run
MATRIX_SIZE = 16  # rows and columns: a kernel of such matrices has next to no work


def time_launch(mode: str, device: torch.device) -> Timing | None:
    """Seconds of one operation without work; None for an execution mode that this device does not have.

    Args:
        mode: "plain" for element-wise operations under autograd, forward and backward, as the runtime runs them;
            "compiled" for matmuls of one compiled region, which cannot be fused; "captured" for kernels of a CUDA
            graph.
    """
    if mode == "captured":
        return time_captured_chain(device) if device.type == "cuda" else None
    return time_compiled_chain(device) if mode == "compiled" else time_eager_chain(device)


def time_eager_chain(device: torch.device) -> Timing:
    """Seconds per operation of an eager chain, counting forward and backward as two operations."""
    x = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device, requires_grad=True)

    def run() -> Tensor:
        y = x
        for _ in range(CHAIN_OPS):
            y = y * 1.01
        (gradient,) = torch.autograd.grad(y, x, x.detach())
        return gradient

    return per_op(time_eager([run], device), 2 * CHAIN_OPS)


def time_compiled_chain(device: torch.device) -> Timing | None:
    """Seconds per matmul of a compiled chain; None if torch.compile does not work, mostly for lack of a compiler."""
    x = torch.eye(MATRIX_SIZE, device=device)

    def chain(y: Tensor) -> Tensor:
        for _ in range(CHAIN_OPS):
            y = y @ x
        return y

    region = torch.compile(chain, fullgraph=True, dynamic=False)
    try:
        region(x)
    except RuntimeError as error:
        print(f"torch.compile does not work here: {error}", flush=True)
        return None
    return per_op(time_eager([lambda: region(x)], device), CHAIN_OPS)


def time_captured_chain(device: torch.device) -> Timing:
    """Seconds per kernel of a chain in a CUDA graph."""
    x = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)

    def run() -> None:
        for _ in range(CHAIN_OPS):
            x.mul_(1.0)

    return per_op(time_captured([run], device), CHAIN_OPS)


def per_op(timing: Timing, num_ops: int) -> Timing:
    """Time of one of equal operations that were timed together."""
    return Timing(timing.seconds / num_ops, timing.spread)
