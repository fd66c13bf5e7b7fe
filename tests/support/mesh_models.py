"""Small models of the families that the mesh parity tests run, with inputs and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from support.models import Tied, tiny_vit

BATCH, CLASSES = 16, 10


@dataclass(frozen=True)
class Case:
    """A model, its input and target at the global batch, and the loss.

    ReLU and max-pooling have kinks. Where a value lies within rounding of one, another order of a sum changes a
    gradient by more than any tolerance. Such models are compared in float64, where no value comes that close.
    """

    make: Callable[[], nn.Module]
    x: Callable[[], torch.Tensor]
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor] = F.cross_entropy
    classes: int = CLASSES
    dtype: torch.dtype = torch.float32


def images(side: int = 32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(BATCH, 3, side, side)


def small(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=CLASSES, **kwargs)


def distilled() -> nn.Module:
    model = timm.create_model(
        "deit_tiny_distilled_patch16_224", num_classes=CLASSES, img_size=32, patch_size=8, depth=2, embed_dim=32,
        num_heads=4,
    )  # fmt: skip
    model.set_distilled_training(True)  # type: ignore[operator]
    return model


def both_heads(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], target) + 0.5 * F.cross_entropy(outputs[1], target)


MODELS: dict[str, Case] = {
    "vit": Case(lambda: tiny_vit(2, embed_dim=32, num_heads=4), images()),
    "vit-3-heads": Case(lambda: tiny_vit(2), images()),
    "deit-distilled": Case(distilled, images(), both_heads),
    "swin": Case(
        small("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2),
              num_heads=(4, 4), drop_path_rate=0.0), images()),
    "convnext": Case(small("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 32, 64)), images(64)),
    "mixer": Case(
        lambda: MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32), images()),
    "resnet18": Case(
        lambda: ResNet(BasicBlock, (2, 2, 2, 2), num_classes=CLASSES, stem_width=16,  # type: ignore[arg-type]
                       channels=(16, 32, 64, 128)),
        images(64), dtype=torch.float64),
    "eva-rotary": Case(
        lambda: Eva(num_classes=CLASSES, img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4, qkv_fused=False,
                    swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True, ref_feat_shape=(4, 4)), images()),
    "tied": Case(Tied, lambda: torch.randint(0, 32, (BATCH, 6)), classes=32),
}  # fmt: skip
