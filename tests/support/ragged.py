"""Plans by hand whose tokens and heads the ranks do not divide: 17 tokens, 3 heads, on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from autopar.ir.plan import Plan
from support.handmade import plan_by_hand

MLP = {"blocks.*.mlp.fc1.linear": "n", "blocks.*.mlp.fc2.linear": "k"}
HEADS = MLP | {"blocks.*.attn.qkv.linear": "nx3@8", "blocks.*.attn.proj.linear": "k@8"}
RESIDUAL = ("norm1.layer_norm", "norm2.layer_norm", "add", "add_1")
TOKENS = {f"blocks.*.{name}": "d1@1" for name in RESIDUAL}
PLANS = {"tokens": TOKENS, "heads": HEADS, "heads and tokens": TOKENS | HEADS}
DRAWS = ("attn.scaled_dot_product_attention.uniform", "attn.proj_drop.dropout.uniform", "attn.proj_drop.dropout.mul")
PLANS["heads, tokens and dropout"] = PLANS["heads and tokens"] | {f"blocks.*.{name}": "d1@1" for name in DRAWS}
HELD_BY_HEADS = {
    "blocks.*.attn.qkv.weight": "tp:0x3@8", "blocks.*.attn.qkv.bias": "tp:0x3@8", "blocks.*.attn.proj.weight": "tp:1@8",
}  # fmt: skip


def vit(rate: float = 0.0, depth: int = 2) -> VisionTransformer:
    """17 tokens, 3 heads."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=16, patch_size=4, num_classes=6, embed_dim=24, depth=depth, num_heads=3, mlp_ratio=2,
        pos_drop_rate=rate, proj_drop_rate=rate, attn_drop_rate=rate, drop_path_rate=rate,
    )  # fmt: skip


def ragged_plan(model: torch.nn.Module, x: torch.Tensor, name: str, precision: str) -> Plan:
    layouts: Mapping[str, str] = HELD_BY_HEADS if "heads" in name else {}
    options: dict[str, Any] = {"strategies": PLANS[name], "shardings": layouts, "precision": precision}
    return plan_by_hand(model, x, 2, [], tp=2, **options)
