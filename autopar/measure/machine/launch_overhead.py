"""What an operation takes beyond its work: plainly, in code of torch.compile, and in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.measure.machine.clock import Timing, timed, timed_captured

OPS = 64  # in a row
SIDE = 16  # of the matrices: a kernel of them has next to no work


def launch(what: str, device: torch.device) -> Timing | None:
    """Seconds of one operation without work; None where programs are not run this way here.

    ``plain`` is an element-wise operation under autograd, forwards and backwards, as the runtime runs it. ``compiled``
    are matmuls of one compiled region, between which nothing can be fused; ``captured`` kernels of a CUDA graph.
    """
    if what == "captured":
        return captured(device) if device.type == "cuda" else None
    return compiled(device) if what == "compiled" else plain(device)


def plain(device: torch.device) -> Timing:
    """Of each of a chain's operations, its backward counted as another."""
    x = torch.ones(SIDE, SIDE, device=device, requires_grad=True)

    def run() -> Tensor:
        y = x
        for _ in range(OPS):
            y = y * 1.01
        (gradient,) = torch.autograd.grad(y, x, x.detach())
        return gradient

    return share(timed([run], device), 2 * OPS)


def compiled(device: torch.device) -> Timing | None:
    """Of each of a compiled chain's matmuls; None where torch.compile does not work, which mostly lacks a compiler."""
    x = torch.eye(SIDE, device=device)

    def chain(y: Tensor) -> Tensor:
        for _ in range(OPS):
            y = y @ x
        return y

    region = torch.compile(chain, fullgraph=True, dynamic=False)
    try:
        region(x)
    except RuntimeError as error:
        print(f"torch.compile does not work here: {error}", flush=True)
        return None
    return share(timed([lambda: region(x)], device), OPS)


def captured(device: torch.device) -> Timing:
    """Of each kernel of a chain in a CUDA graph."""
    x = torch.ones(SIDE, SIDE, device=device)

    def run() -> None:
        for _ in range(OPS):
            x.mul_(1.0)

    return share(timed_captured([run], device), OPS)


def share(timing: Timing, parts: int) -> Timing:
    """The time of one of equal parts."""
    return Timing(timing.seconds / parts, timing.spread)
