"""Linear layers whose wgrad matmul adds to the main gradient directly (Megatron's gradient accumulation fusion).

Without fusion a weight gradient is written, read again and added to the sum over microbatches. With small microbatches
that takes as long as some of the matmuls: 7 ms of kernels in a step of 141 ms (ViT-L on 4 pipeline stages, 32
microbatches of 16, H200).

The operator gets a key, a tensor whose address names the weight: the main gradient itself, or under ZeRO-2 a tensor of
one element. The owner of the main gradient registers here under the key. It provides the buffer, says whether it is
initialized, and is notified after each accumulation. The write is hidden from torch.compile, which would otherwise copy
the buffer: nothing else in a compiled region reads it, and the operator's result, the gradient of the layer's input,
keeps the operator alive.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor


class MainGradOwner(Protocol):
    """Owner of one weight's main gradient."""

    def buffer(self) -> Tensor:
        """Buffer [out, in] for the next gradient, to which it is added if `is_initialized`."""
        ...

    def is_initialized(self) -> bool:
        """Whether the buffer holds a sum; otherwise its content is undefined."""
        ...

    def mark_accumulated(self) -> None:
        """Note that a gradient was added."""
        ...


OWNERS: WeakValueDictionary[int, MainGradOwner] = WeakValueDictionary()  # by address


def register(key: Tensor, owner: MainGradOwner) -> None:
    """Register the owner of a main gradient under its key, for as long as the owner exists."""
    OWNERS[key.data_ptr()] = owner


def unregister(key: Tensor) -> None:
    """Forget an owner."""
    del OWNERS[key.data_ptr()]


def takes_products(total: Tensor, dtype: torch.dtype) -> bool:
    """Whether `add_product` adds products of matrices of a dtype to ``total``."""
    return total.ndim == 2 and total.dtype in (torch.float32, dtype) and total.is_contiguous()


def add_product(total: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
    """Write ``left`` [m, k] times ``right`` [k, n] into ``total`` [m, n], or add it to ``total`` if ``accumulate``."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=int(accumulate), out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=int(accumulate), out=total)
    else:  # the CPU has no products in another dtype than their factors'
        product = (left @ right).to(total.dtype)
        total.add_(product) if accumulate else total.copy_(product)


@torch.library.custom_op("autopar::linear_wgrad_fused_backward", mutates_args=())
def linear_wgrad_fused_backward(gradient: Tensor, x: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """The gradient of x [rows, in]; the gradient of ``weight`` [out, in] is added to the main gradient.

    Args:
        gradient: of the layer's output, [rows, out].
        key: names the main gradient.
    """
    owner = OWNERS[key.data_ptr()]
    made = gradient @ weight
    # ``data``: autograd would report a buffer that was modified since the forward.
    add_product(owner.buffer().data, gradient.t(), x, owner.is_initialized())
    owner.mark_accumulated()
    return made


@linear_wgrad_fused_backward.register_fake
def _like_x(gradient: Tensor, x: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    return gradient.new_empty(x.shape)


class _LinearWgradFused(torch.autograd.Function):
    """Rows are made outside of the operator, so that a compiler fuses the copies of transposed operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight, key)
        ctx.shape = x.shape
        return F.linear(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, key = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        for_x = linear_wgrad_fused_backward(rows, x, weight, key).view(ctx.shape)
        # After the operator: a compiler would compute the gradient twice if the bias sum came first.
        return for_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


torch.library.define("autopar::linear_wgrad_fused", "(Tensor x, Tensor weight, Tensor? bias, Tensor key) -> Tensor")


@torch.library.impl("autopar::linear_wgrad_fused", "CompositeImplicitAutograd")
def linear_wgrad_fused(x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
    """``aten.linear`` whose ``weight`` gets no gradient from autograd; it is added to the main gradient instead."""
    return _LinearWgradFused.apply(x, weight, bias, key)  # type: ignore[return-value]
