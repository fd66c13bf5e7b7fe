"""A ViT on the meta device, and its plans under measured costs."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import autopar


def vit(depth: int = 3, **kwargs: Any) -> nn.Module:
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=depth, num_heads=4, num_classes=10, **kwargs
    ).to("meta")  # fmt: skip


def images(batch: int) -> torch.Tensor:
    return torch.empty(batch, 3, 32, 32, device="meta")


def plan(**options: Any) -> autopar.Plan:
    return autopar.plan(vit(), 2, images(16), **options)
