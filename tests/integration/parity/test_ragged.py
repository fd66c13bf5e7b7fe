"""Tokens and heads that the ranks do not divide: outputs, loss, gradients and weights are one device's."""

from __future__ import annotations

import pytest
import torch
from support.handmade import plan_by_hand
from timm.models.vision_transformer import VisionTransformer

from autopar.tools.parity.compare import compare

HEADS = {"*.attn.qkv.linear": "nx3@8", "*.attn.proj.linear": "k@8", "*.mlp.fc1.linear": "n", "*.mlp.fc2.linear": "k"}
RESIDUAL = ("*.norm1.layer_norm", "*.norm2.layer_norm", "*.add", "*.add_1")
PLANS = {
    "tokens": dict.fromkeys(("blocks." + name for name in RESIDUAL), "d1@1"),
    "heads": {f"blocks.{name}": label for name, label in HEADS.items()},
}
PLANS["heads and tokens"] = PLANS["tokens"] | PLANS["heads"]


def vit() -> VisionTransformer:
    """17 tokens, 3 heads."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=16, patch_size=4, num_classes=6, embed_dim=24, depth=2, num_heads=3, mlp_ratio=2
    )


@pytest.mark.parametrize("name", PLANS)
def test_ragged_parts_equal_one_device(name: str) -> None:
    model, x = vit().double().train(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    layouts: dict[str, str] = {}
    if "heads" in name:
        layouts = {"blocks.*.attn.qkv.weight": "tp:0x3@8", "blocks.*.attn.qkv.bias": "tp:0x3@8",
                   "blocks.*.attn.proj.weight": "tp:1@8"}  # fmt: skip
    plan = plan_by_hand(model, x, 2, [], tp=2, strategies=PLANS[name], shardings=layouts, precision="fp64")
    parity = compare(model, x, devices=2, steps=2, plan=plan)
    assert parity.ok, [(row.quantity, row.worst, row.max_absolute) for row in parity.rows if not row.ok]
