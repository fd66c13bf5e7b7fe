"""Convolutions that are products of matrices: those that cut a tensor into patches, and those of a single place.

A convolution of patches is the first layer of a vision transformer: its stride is its kernel, so that it multiplies
each patch with one matrix. Where channels are no multiple of 8, as those of an image, cuDNN pads them and takes kernels
of an older generation: 1.4 ms instead of 0.1 (ViT-L, 128 images, bfloat16, H200).

Behind the strides of a network for larger images a small one has shrunk to one place, of which a padded kernel meets
all but its middle with padding. Memory of one place is contiguous and channels last at once, and torch.compile expects
the gradient of the weight in the other format than cuDNN makes it in (torch 2.11).
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
    """The convolution of ``x`` [N, C, …] with ``weight`` [O, C, …], its kernel being the stride and dividing the sizes.

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
    """The convolution of ``x`` [N, C, 1, …] with ``weight`` [O, C/groups, …], [N, O, 1, …].

    Args:
        tap: where in the kernel the only place is met, by dim.
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
