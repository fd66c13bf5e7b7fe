"""What an operation takes beyond its work: plainly, in code of torch.compile, and in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.measure.timer import Timing, time_captured, time_eager

CHAIN_OPS = 64  # in a row
MATRIX_SIZE = 16  # of the matrices: a kernel of them has next to no work


def time_launch(what: str, device: torch.device) -> Timing | None:
    """Seconds of one operation without work; None where programs are not run this way here.

    ``plain`` is an element-wise operation under autograd, forwards and backwards, as the runtime runs it. ``compiled``
    are matmuls of one compiled region, between which nothing can be fused; ``captured`` kernels of a CUDA graph.
    """
    if what == "captured":
        return time_captured_chain(device) if device.type == "cuda" else None
    return time_compiled_chain(device) if what == "compiled" else time_eager_chain(device)


def time_eager_chain(device: torch.device) -> Timing:
    """Of each of a chain's operations, its backward counted as another."""
    x = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device, requires_grad=True)

    def run() -> Tensor:
        y = x
        for _ in range(CHAIN_OPS):
            y = y * 1.01
        (gradient,) = torch.autograd.grad(y, x, x.detach())
        return gradient

    return per_op(time_eager([run], device), 2 * CHAIN_OPS)


def time_compiled_chain(device: torch.device) -> Timing | None:
    """Of each of a compiled chain's matmuls; None where torch.compile does not work, which mostly lacks a compiler."""
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
    """Of each kernel of a chain in a CUDA graph."""
    x = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device)

    def run() -> None:
        for _ in range(CHAIN_OPS):
            x.mul_(1.0)

    return per_op(time_captured([run], device), CHAIN_OPS)


def per_op(timing: Timing, parts: int) -> Timing:
    """The time of one of equal parts."""
    return Timing(timing.seconds / parts, timing.spread)
