"""What a device computes by itself, ready to be timed: matmuls, attention, convolutions, memory-bound work, AdamW.

Each returns copies of one run on data of their own that together exceed what caches hold. FLOPs and bytes are counted
as `autopar.cost.groups.cost_graph` counts those of a traced operation: a forward reads its operands and writes its
result; a backward also reads the gradient that arrives and what was kept, and is as many equal parts as it has
products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.measure.machine.cases import Case
from autopar.measure.machine.points import OpCounts
from autopar.measure.timer import Workload

CPU_CACHE_BYTES = 32 * 2**20  # what a core may find in its last level
MAX_COPIES = 16
ADAMW_BYTES_PER_PARAMETER = (
    32  # bytes per parameter that AdamW reads and writes: value, gradient and two moments, each both
)
NUM_OPTIMIZER_TENSORS = 16


@dataclass(frozen=True)
class KernelRuns:
    """Equal runs on data of their own, and what the planner says that one does."""

    runs: tuple[Workload, ...]
    ops: tuple[OpCounts, ...]


def kernel_runs(case: Case, device: torch.device) -> KernelRuns:
    """A case that one device runs by itself."""
    return BUILDERS[case.kind](case, device)


def copies(num_bytes: float, device: torch.device, make: Callable[[], Workload]) -> tuple[Workload, ...]:
    """As many runs as have twice the cache's bytes together, up to a limit; in a row each finds its data in memory."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CPU_CACHE_BYTES
    return tuple(make() for _ in range(min(MAX_COPIES, max(1, ceil(2 * cache / num_bytes)))))


def matmul(case: Case, device: torch.device) -> KernelRuns:
    """A linear layer's product, x · wᵀ, or both of its backward's, g · w and gᵀ · x."""
    tokens, read, made = case.sizes
    dtype = getattr(torch, case.dtype)
    elements = tokens * read + made * read + tokens * made
    num_bytes = elements * dtype.itemsize

    def make() -> Workload:
        x, w = (
            torch.randn(tokens, read, device=device, dtype=dtype),
            torch.randn(made, read, device=device, dtype=dtype),
        )
        g = torch.randn(tokens, made, device=device, dtype=dtype)
        return (lambda: F.linear(x, w)) if case.variant == "forward" else (lambda: (g @ w, g.t() @ x))

    flops = 2.0 * tokens * read * made
    if case.variant == "forward":
        return KernelRuns(copies(num_bytes, device, make), (OpCounts(flops, num_bytes),))
    moved = elements + tokens * read + made * read
    return KernelRuns(copies(num_bytes, device, make), (OpCounts(flops, moved * dtype.itemsize / 2),) * 2)


def attention(case: Case, device: torch.device) -> KernelRuns:
    """Scaled dot-product attention: two products forwards, five backwards (FlashAttention, algorithm 4)."""
    batch, heads, tokens, width = case.sizes
    dtype = getattr(torch, case.dtype)
    size = batch * heads * tokens * width * dtype.itemsize

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def make() -> Workload:
        shape = (batch, heads, tokens, width)
        operands = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
        return workload(case, forward, tuple(operands[:3]), operands[3])

    flops = 4.0 * batch * heads * tokens * tokens * width
    parts = (OpCounts(flops, 4 * size), OpCounts(2.5 * flops, 8 * size))
    return KernelRuns(copies(4 * size, device, make), parts[:1] if case.variant == "forward" else parts)


def convolution(case: Case, device: torch.device) -> KernelRuns:
    """A convolution, channels last on a GPU as tensor cores want them."""
    batch, read, made, image, kernel, stride, groups = case.sizes
    dtype, padding = getattr(torch, case.dtype), 0 if stride == kernel else kernel // 2
    side = (image + 2 * padding - kernel) // stride + 1
    memory_format = torch.channels_last if device.type == "cuda" else torch.contiguous_format

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=stride, padding=padding, groups=groups)

    def make() -> Workload:
        shapes = (batch, read, image, image), (made, read // groups, kernel, kernel), (batch, made, side, side)
        x, w, g = (torch.randn(s, device=device, dtype=dtype).contiguous(memory_format=memory_format) for s in shapes)
        return workload(case, forward, (x, w), g)

    x, w, y = batch * read * image**2, made * (read // groups) * kernel**2, batch * made * side**2
    flops, size = 2.0 * y * (read // groups) * kernel**2, dtype.itemsize
    product = OpCounts(flops, (2 * x + 2 * w + y) * size / 2)
    parts = (OpCounts(flops, (x + w + y) * size), product, product)
    return KernelRuns(copies((x + w + y) * size, device, make), parts[:1] if case.variant == "forward" else parts)


def memory(case: Case, device: torch.device) -> KernelRuns:
    """An operation that memory bounds, forwards and, where it has one, backwards."""
    (elements,) = case.sizes
    dtype = getattr(torch, case.dtype)
    size, width = elements * dtype.itemsize, min(elements, 512)

    def make() -> Workload:
        x, y = (torch.randn(elements // width, width, device=device, dtype=dtype) for _ in range(2))
        if case.variant == "add":
            return lambda: x + y
        forward = F.gelu if case.variant == "gelu" else lambda x: F.layer_norm(x, (width,))
        return workload(case, forward, (x,), y)

    parts = (OpCounts(0.0, 3 * size),) if case.variant == "add" else (OpCounts(0.0, 2 * size), OpCounts(0.0, 3 * size))
    return KernelRuns(copies(3 * size, device, make), parts)


def workload(case: Case, forward: Callable[..., Tensor], operands: tuple[Tensor, ...], gradient: Tensor) -> Workload:
    """A forward without a graph, or with the backward of all its operands."""
    if case.variant == "forward":
        return lambda: forward(*operands)
    for operand in operands:
        operand.requires_grad_()
    return lambda: torch.autograd.grad(forward(*operands), operands, gradient)


def optimizer(case: Case, device: torch.device) -> KernelRuns:
    """A step of fused AdamW over parameters in several tensors."""
    (numel,) = case.sizes
    weights = [
        torch.randn(numel // NUM_OPTIMIZER_TENSORS, device=device, requires_grad=True)
        for _ in range(NUM_OPTIMIZER_TENSORS)
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    step = torch.optim.AdamW(weights, fused=True, capturable=device.type == "cuda").step
    return KernelRuns((step,), (OpCounts(0.0, float(ADAMW_BYTES_PER_PARAMETER * numel)),))


BUILDERS: Mapping[str, Callable[[Case, torch.device], KernelRuns]] = {
    "matmul": matmul, "attention": attention, "convolution": convolution, "depthwise": convolution, "memory": memory,
    "optimizer": optimizer,
}  # fmt: skip
