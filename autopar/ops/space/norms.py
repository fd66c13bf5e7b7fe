"""Batch and group norms of feature maps of which each rank holds a part.

Mean and variance are those of all ranks' elements: each rank gathers the moments of the others' parts, and the backward
sums the two sums over elements that the gradient of a norm needs. Given the moments, a norm is torch's batch norm in
evaluation, one pass over memory. Moments and sums are in float32 at least.

A tensor [N, C, …] has ``groups`` of channels. ``over_samples`` says whether the samples share their moments: a batch
norm has as many groups as channels and shares, a group norm does neither. A group norm is a batch norm of one sample
with N · C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.collectives import on

MOMENTS = 3  # mean, variance, and number of elements

torch.library.define(
    "autopar::split_batch_norm",
    # Like torch's batch_norm, it does not say that it updates its statistics.
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum, float eps, "
    "int ranks, str axis) -> Tensor",
)
torch.library.define(
    "autopar::split_group_norm",
    "(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, int ranks, str axis) -> Tensor",
)


@torch.library.impl("autopar::split_batch_norm", "CompositeImplicitAutograd")
def split_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """A rank's part of the batch norm of [N, C, …] in training; running statistics are equal on all ranks."""
    moments = part_moments(x.detach(), x.shape[1], True, ranks, axis)
    with torch.no_grad():
        mean, variance, count = moments
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return normalise(x, moments, weight, bias, x.shape[1], True, eps, ranks, axis)


@torch.library.impl("autopar::split_group_norm", "CompositeImplicitAutograd")
def split_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: int, axis: str
) -> Tensor:
    """A rank's part of the group norm of [N, C, …]."""
    moments = part_moments(x.detach(), num_groups, False, ranks, axis)
    return normalise(x, moments, weight, bias, num_groups, False, eps, ranks, axis)


# -- elements, moments and weights by channel ----------------------------------------------------------------------


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of moments and sums."""
    return torch.promote_types(x.dtype, torch.float32)


def num_moments(x: Tensor, groups: int, over_samples: bool) -> int:
    """Number of sets of elements that have moments."""
    return groups if over_samples else x.shape[0] * groups


def as_channels(x: Tensor, over_samples: bool) -> Tensor:
    """The tensor whose channels do not share their moments with other samples."""
    return x if over_samples else x.reshape(1, x.shape[0] * x.shape[1], -1)


def laid_out_as(x: Tensor, made: Tensor, over_samples: bool) -> Tensor:
    """The result of a norm over `as_channels` in the shape of ``x`` and, as compiled code expects, in its layout.

    Kernels differ: those of CUDA return contiguous gradients of images in channels last.
    """
    if over_samples and made.stride() != torch.empty_like(x, device="meta").stride():
        return torch.empty_like(x).copy_(made)
    return made.view(x.shape)


def by_channel(moment: Tensor, channels: Tensor) -> Tensor:
    """A value of each set of elements for each channel that has them."""
    return moment.repeat_interleave(channels.shape[1] // len(moment))


def weight_by_channel(weight: Tensor | None, channels: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A weight [C] for each channel, those of other samples included."""
    return None if weight is None else weight.to(dtype).repeat(channels.shape[1] // len(weight))


# -- operators that communicate ------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::part_moments", mutates_args=())
def part_moments(x: Tensor, groups: int, over_samples: bool, ranks: int, axis: str) -> Tensor:
    """Mean, variance and number of elements of all ranks' parts, stacked: [3, num_moments]."""
    elements = x.unflatten(1, (groups, -1)).to(wide_dtype(x)).flatten(3)
    variance, mean = torch.var_mean(elements, [0, 2, 3] if over_samples else [2, 3], correction=0)
    counts = torch.full_like(mean, elements.numel() // mean.numel())
    own = torch.stack([moment.flatten() for moment in (mean, variance, counts)])
    means, variances, counts = on(axis, ranks).all_gather(own).unbind(1)
    shares = counts / counts.sum(0)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return torch.stack([mean, variance, counts.sum(0)])


@torch.library.custom_op("autopar::normalise", mutates_args=())
def normalise(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, over_samples: bool, eps: float,
    ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(variance + eps) * weight + bias, where the moments are those of all ranks' ``x``."""
    channels = as_channels(x, over_samples)
    mean, variance = (by_channel(moment, channels) for moment in moments[:2])
    weights = [weight_by_channel(vector, channels, mean.dtype) for vector in (weight, bias)]
    made = F.batch_norm(channels, mean, variance, *weights, training=False, eps=eps)
    return laid_out_as(x, made, over_samples)


@torch.library.custom_op("autopar::normalise_backward", mutates_args=())
def normalise_backward(
    gradient: Tensor, x: Tensor, moments: Tensor, weight: Tensor | None, groups: int, over_samples: bool, eps: float,
    ranks: int, axis: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, and this rank's summands of those of weight and bias."""
    channels, arriving = as_channels(x, over_samples), as_channels(gradient, over_samples)
    mean, variance = (by_channel(moment, channels) for moment in moments[:2])
    scales = weight_by_channel(weight, channels, mean.dtype)
    # With given moments; how these depend on x follows. CUDA wants the empty tensors that its forward would save.
    empty = mean.new_empty(0)
    made, of_scales, of_shifts = torch.ops.aten.native_batch_norm_backward(
        arriving, channels, scales, mean, variance, empty, empty, False, eps, [True, True, True]
    )
    sums = torch.stack([of_shifts, of_scales])
    of_moments = (sums if scales is None else sums * scales).unflatten(1, (moments.shape[1], -1)).sum(2)
    on(axis, ranks).all_reduce(of_moments)
    scale = (moments[1] + eps).rsqrt()
    of_mean, slope = of_moments / moments[2] * scale
    slope = slope * scale
    shape = [1, -1, *[1] * (channels.dim() - 2)]
    slope, shift = (by_channel(f, channels).view(shape) for f in (slope, slope * moments[0] - of_mean))
    made.addcmul_(channels, slope, value=-1).add_(shift)  # in place: no further tensor of the part's size
    of_weight, of_bias = (total.unflatten(0, (-1, x.shape[1])).sum(0) for total in (of_scales, of_shifts))
    return laid_out_as(x, made, over_samples), of_weight, of_bias


@part_moments.register_fake
def _moments(x: Tensor, groups: int, over_samples: bool, ranks: int, axis: str) -> Tensor:
    return x.new_empty([MOMENTS, num_moments(x, groups, over_samples)], dtype=wide_dtype(x))


def like_part(x: Tensor, over_samples: bool) -> Tensor:
    """An empty tensor laid out as the results of `as_channels` are."""
    return torch.empty_like(x) if over_samples else x.new_empty(x.shape)


@normalise.register_fake
def _normalised(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, over_samples: bool, eps: float,
    ranks: int, axis: str,
) -> Tensor:  # fmt: skip
    return like_part(x, over_samples)


@normalise_backward.register_fake
def _gradients(
    gradient: Tensor, x: Tensor, moments: Tensor, weight: Tensor | None, groups: int, over_samples: bool, eps: float,
    ranks: int, axis: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    vector = x.new_empty([x.shape[1]], dtype=wide_dtype(x))
    return like_part(x, over_samples), vector, torch.empty_like(vector)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, moments, weight, bias, *ctx.how = inputs
    ctx.save_for_backward(x, moments, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _normalised_gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    x, moments, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = normalise_backward(gradient, x, moments, weight, *ctx.how)
    trained = [
        None if weight is None else of_weight.to(weight.dtype),
        None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype),
    ]
    return of_x, None, *trained, *[None] * len(ctx.how)


normalise.register_autograd(_normalised_gradients, setup_context=_keep_inputs)
