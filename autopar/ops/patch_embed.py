"""Convolutions as matrix products: patch embeddings, and convolutions of a single place.

A patch embedding is the first layer of a vision transformer: its stride equals its kernel, so it multiplies each patch
with one matrix. Channels of an image are no multiple of 8; for them cuDNN pads and takes kernels of an older
generation: 1.4 ms instead of 0.1 (ViT-L, 128 images, bfloat16, H200).

A network for larger images shrinks a small image to one place. There a padded kernel multiplies padding with all but
its middle. Memory of one place is both contiguous and channels last, and torch.compile expects the weight's gradient in
the other format than cuDNN produces (torch 2.11).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

torch.library.define(
    "autopar::patch_convolution", "(Tensor x, Tensor weight, Tensor? bias, bool channels_last) -> Tensor"
)
torch.library.define(
    "autopar::place_convolution", "(Tensor x, Tensor weight, Tensor? bias, int[] tap, int groups) -> Tensor"
)


@torch.library.impl("autopar::patch_convolution", "CompositeImplicitAutograd")
def patch_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, channels_last: bool) -> Tensor:
    """The convolution of ``x`` [N, C, …] with ``weight`` [O, C, …]; the kernel is the stride and divides the sizes.

    Args:
        channels_last: the memory format of the result.
    """
    dims, kernel = x.dim() - 2, weight.shape[2:]
    for k in range(dims):  # [N, C, places, kernel, places, kernel, …]
        dim = 2 + 2 * k
        x = x.unflatten(dim, (x.shape[dim] // kernel[k], kernel[k]))
    places = [2 + 2 * k for k in range(dims)]
    patches = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(dims + 1)
    product = F.linear(patches, weight.flatten(1), bias).movedim(-1, 1)
    return product if channels_last else product.contiguous()


@torch.library.impl("autopar::place_convolution", "CompositeImplicitAutograd")
def place_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, tap: list[int], groups: int) -> Tensor:
    """The convolution of ``x`` [N, C, 1, …] with ``weight`` [O, C/groups, …]: [N, O, 1, …].

    Args:
        tap: index in the kernel that meets the single place, per dim.
    """
    for place in tap:
        weight = weight.select(2, place)
    if groups == 1:
        product = F.linear(x.flatten(1), weight, bias)
    else:
        product = torch.einsum(
            "ngc,goc->ngo", x.flatten(1).unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
        )
        product = product.flatten(1) if bias is None else product.flatten(1) + bias
    return product.unflatten(1, (-1, *(1 for _ in tap)))
