"""Kernels of one device, ready to be timed: matmuls, attention, convolutions, memory-bound operations, AdamW.

Each function returns equal runs on separate data that together exceed the caches. FLOPs and bytes are counted as
`autopar.cost.groups.cost_graph` counts them for traced operations. A forward reads its operands and writes its result.
A backward also reads the output's gradient and the saved tensors; it counts as one operation per product.
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
from autopar.measure.timer import Timing, Workload, time_captured, time_eager

CPU_CACHE_BYTES = 32 * 2**20  # last-level cache that one core may use
MAX_COPIES = 16
# Bytes per parameter that AdamW reads and writes: value, gradient and two moments, each both.
ADAMW_BYTES_PER_PARAMETER = 32
NUM_OPTIMIZER_TENSORS = 16
CHAIN_OPS = 64  # consecutive operations of one run
MATRIX_SIZE = 16  # rows and columns: a kernel of such matrices has next to no work


@dataclass(frozen=True)
class KernelRuns:
    """Equal runs on separate data, and the operations of one run as the planner counts them."""

    runs: tuple[Workload, ...]
    ops: tuple[OpCounts, ...]


def kernel_runs(case: Case, device: torch.device) -> KernelRuns:
    """The runs of a case without communication."""
    return BUILDERS[case.kind](case, device)


def copies(num_bytes: float, device: torch.device, make: Callable[[], Workload]) -> tuple[Workload, ...]:
    """So many runs that their data is twice the size of the cache, at most MAX_COPIES.

    Called in turn, each finds its data in memory and not in the cache.

    Args:
        num_bytes: data of one run.
    """
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CPU_CACHE_BYTES
    return tuple(make() for _ in range(min(MAX_COPIES, max(1, ceil(2 * cache / num_bytes)))))


def matmul(case: Case, device: torch.device) -> KernelRuns:
    """A linear layer's forward product x · wᵀ, or its two backward products g · w and gᵀ · x."""
    tokens, in_features, out_features = case.sizes
    dtype = getattr(torch, case.dtype)
    elements = tokens * in_features + out_features * in_features + tokens * out_features
    num_bytes = elements * dtype.itemsize

    def make() -> Workload:
        x = torch.randn(tokens, in_features, device=device, dtype=dtype)
        w = torch.randn(out_features, in_features, device=device, dtype=dtype)
        g = torch.randn(tokens, out_features, device=device, dtype=dtype)
        return (lambda: F.linear(x, w)) if case.variant == "forward" else (lambda: (g @ w, g.t() @ x))

    flops = 2.0 * tokens * in_features * out_features
    if case.variant == "forward":
        return KernelRuns(copies(num_bytes, device, make), (OpCounts(flops, num_bytes),))
    moved_elements = elements + tokens * in_features + out_features * in_features
    return KernelRuns(copies(num_bytes, device, make), (OpCounts(flops, moved_elements * dtype.itemsize / 2),) * 2)


def attention(case: Case, device: torch.device) -> KernelRuns:
    """Scaled dot-product attention: two products forward, five backward (FlashAttention, algorithm 4)."""
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
    ops = (OpCounts(flops, 4 * size), OpCounts(2.5 * flops, 8 * size))
    return KernelRuns(copies(4 * size, device, make), ops[:1] if case.variant == "forward" else ops)


def convolution(case: Case, device: torch.device) -> KernelRuns:
    """A convolution; on a GPU in channels_last, which tensor cores need."""
    batch, in_channels, out_channels, image, kernel, stride, groups = case.sizes
    dtype, padding = getattr(torch, case.dtype), 0 if stride == kernel else kernel // 2
    side = (image + 2 * padding - kernel) // stride + 1
    memory_format = torch.channels_last if device.type == "cuda" else torch.contiguous_format

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=stride, padding=padding, groups=groups)

    def make() -> Workload:
        x_shape, g_shape = (batch, in_channels, image, image), (batch, out_channels, side, side)
        shapes = x_shape, (out_channels, in_channels // groups, kernel, kernel), g_shape
        x, w, g = (torch.randn(s, device=device, dtype=dtype).contiguous(memory_format=memory_format) for s in shapes)
        return workload(case, forward, (x, w), g)

    x, y = batch * in_channels * image**2, batch * out_channels * side**2
    w = out_channels * (in_channels // groups) * kernel**2
    flops, size = 2.0 * y * (in_channels // groups) * kernel**2, dtype.itemsize
    product = OpCounts(flops, (2 * x + 2 * w + y) * size / 2)
    ops = (OpCounts(flops, (x + w + y) * size), product, product)
    return KernelRuns(copies((x + w + y) * size, device, make), ops[:1] if case.variant == "forward" else ops)


def memory(case: Case, device: torch.device) -> KernelRuns:
    """A memory-bound operation: the forward, and for all but "add" the backward."""
    (elements,) = case.sizes
    dtype = getattr(torch, case.dtype)
    size, width = elements * dtype.itemsize, min(elements, 512)

    def make() -> Workload:
        x, y = (torch.randn(elements // width, width, device=device, dtype=dtype) for _ in range(2))
        if case.variant == "add":
            return lambda: x + y
        forward = F.gelu if case.variant == "gelu" else lambda x: F.layer_norm(x, (width,))
        return workload(case, forward, (x,), y)

    ops = (OpCounts(0.0, 3 * size),) if case.variant == "add" else (OpCounts(0.0, 2 * size), OpCounts(0.0, 3 * size))
    return KernelRuns(copies(3 * size, device, make), ops)


def workload(case: Case, forward: Callable[..., Tensor], operands: tuple[Tensor, ...], gradient: Tensor) -> Workload:
    """A run of the forward alone, or of the forward and the backward for all operands."""
    if case.variant == "forward":
        return lambda: forward(*operands)
    for operand in operands:
        operand.requires_grad_()
    return lambda: torch.autograd.grad(forward(*operands), operands, gradient)


def optimizer(case: Case, device: torch.device) -> KernelRuns:
    """A step of fused AdamW over parameters in NUM_OPTIMIZER_TENSORS tensors."""
    (numel,) = case.sizes
    weights = [
        torch.randn(numel // NUM_OPTIMIZER_TENSORS, device=device, requires_grad=True)
        for _ in range(NUM_OPTIMIZER_TENSORS)
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    step = torch.optim.AdamW(weights, fused=True, capturable=device.type == "cuda").step
    return KernelRuns((step,), (OpCounts(0.0, float(ADAMW_BYTES_PER_PARAMETER * numel)),))


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


BUILDERS: Mapping[str, Callable[[Case, torch.device], KernelRuns]] = {
    "matmul": matmul, "attention": attention, "convolution": convolution, "depthwise": convolution, "memory": memory,
    "optimizer": optimizer,
}  # fmt: skip
