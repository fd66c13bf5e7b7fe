"""Linear layers and convolutions whose backward leaves the weight's gradient for later (zero-bubble schedules).

Such a layer takes two slots more: tensors without data, of the shapes of its output and of its input. Its backward
returns the output's gradient and the input as the slots' gradients. They leave compiled regions as any gradient does,
so the compiler keeps their memory. `autopar.runtime.engine.deferred_wgrads` multiplies them later.

Rejected: to partition the joint graph of each compiled region into two programs. Products of weights are kernels of
their own in either case, while three programs a region take private interfaces of the compiler, and eager and
checkpointed stages would need another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


class _LinearSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad_slot: Tensor, x_slot: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, read = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        for_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return for_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, rows, read


class _ConvolutionSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int, bias_grad: bool, grad_slot: Tensor, x_slot: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.form, ctx.bias_sizes = (stride, padding, dilation, groups), [weight.shape[0]] if bias_grad else None
        return aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0], False, ctx.bias_sizes is not None and ctx.needs_input_grad[2]
        for_x, for_bias = None, None
        if any(wanted):
            for_x, _, for_bias = convolution_gradients(gradient, x, weight, ctx.form, ctx.bias_sizes, wanted)
        return for_x, None, for_bias, None, None, None, None, None, gradient, x


def convolution_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, form: tuple, bias_sizes: Sequence[int] | None, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Gradients of a convolution's input, weight and bias, as far as they are wanted.

    Args:
        form: stride, padding, dilation and groups.
    """
    stride, padding, dilation, groups = form
    return aten.convolution_backward(
        gradient, x, weight, bias_sizes, stride, padding, dilation, False, [0] * len(stride), groups, wanted
    )


torch.library.define(
    "autopar::linear_split", "(Tensor x, Tensor weight, Tensor? bias, Tensor grad_slot, Tensor x_slot) -> Tensor"
)
torch.library.define(
    "autopar::convolution_split",
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, "
    "bool bias_grad, Tensor grad_slot, Tensor x_slot) -> Tensor",
)


@torch.library.impl("autopar::linear_split", "CompositeImplicitAutograd")
def linear_split(x: Tensor, weight: Tensor, bias: Tensor | None, grad_slot: Tensor, x_slot: Tensor) -> Tensor:
    """``aten.linear`` whose ``weight`` gets no gradient from autograd.

    Args:
        grad_slot, x_slot: tensors [rows, out] and [rows, in], whose gradients are the output's gradient and ``x``.
    """
    return _LinearSplit.apply(x, weight, bias, grad_slot, x_slot)  # type: ignore[return-value]


@torch.library.impl("autopar::convolution_split", "CompositeImplicitAutograd")
def convolution_split(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, bias_grad: bool, grad_slot: Tensor, x_slot: Tensor,
) -> Tensor:  # fmt: skip
    """``aten.convolution`` whose ``weight`` gets no gradient from autograd.

    Args:
        bias_grad: whether ``bias`` gets one.
        grad_slot, x_slot: tensors of the shapes of output and input, whose gradients are the output's gradient and
            ``x``.
    """
    return _ConvolutionSplit.apply(  # type: ignore[return-value]
        x, weight, bias, stride, padding, dilation, groups, bias_grad, grad_slot, x_slot
    )
