"""Models of pictures, and plans by hand that split the height of their feature maps over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.sharding.lookup import rule_of
from autopar.sharding.rule import strategy

CLASSES = 10


class UNet(nn.Module):
    """Convolutions with batch and group norms, strided and dilated ones, and all ways up: a logit for each pixel."""

    def __init__(self, width: int = 8, classes: int = CLASSES) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.down1 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.ReLU())
        self.norm1 = nn.GroupNorm(2, width)
        self.down2 = nn.Sequential(nn.Conv2d(width, width, 3, 2, padding=1), nn.InstanceNorm2d(width), nn.GELU())
        self.up2 = nn.ConvTranspose2d(width, width, 4, 2, padding=1)
        self.up1 = nn.ConvTranspose2d(width, width, 2, 2)
        self.merge = nn.Conv2d(2 * width, width, 3, padding=1)
        self.smooth = nn.AvgPool2d(3, 1, padding=1)
        self.head = nn.Conv2d(4 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        second = self.norm1(self.down1(first))
        deep = self.down2(second)
        up = self.merge(torch.cat([self.up2(deep), second], 1))
        size = first.shape[2:]
        ways = [
            self.up1(up),
            F.interpolate(up, size, mode="bilinear"),
            F.interpolate(deep, scale_factor=4, mode="bicubic", align_corners=True),
            F.interpolate(up, size, mode="nearest"),
        ]
        return self.head(torch.cat([self.smooth(first) + ways[0], *ways[1:]], 1))


class Segmenter(nn.Module):
    """A backbone of timm, and a head that resizes and joins the maps of all its stages."""

    def __init__(self, name: str, width: int = 16, classes: int = CLASSES, **options: Any) -> None:
        super().__init__()
        self.backbone = timm.create_model(name, features_only=True, **options)
        widths = self.backbone.feature_info.channels()  # type: ignore[operator, union-attr]
        self.laterals = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in widths)
        self.head = nn.Sequential(nn.Conv2d(len(widths) * width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [lateral(found) for lateral, found in zip(self.laterals, self.backbone(x))]
        maps = [F.interpolate(found, maps[0].shape[2:], mode="bilinear", align_corners=False) for found in maps]
        return self.classify(self.head(torch.cat(maps, 1)))


def segformer(classes: int = CLASSES, **sizes: Any) -> nn.Module:
    """SegFormer-B0, or one of other sizes."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    class Logits(nn.Module):
        """The logits of a model of transformers."""

        def __init__(self) -> None:
            super().__init__()
            config = SegformerConfig(drop_path_rate=0.0, classifier_dropout_prob=0.0, **sizes)
            config.num_labels = classes
            self.model = SegformerForSemanticSegmentation(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(pixel_values=x).logits

    return Logits()


@dataclass(frozen=True)
class Case:
    """A model and the size of its pictures."""

    make: Callable[[], nn.Module]
    height: int
    width: int


MODELS: dict[str, Case] = {
    "unet": Case(UNet, 64, 48),
    "resnet50": Case(
        lambda: timm.create_model(
            "resnet50", num_classes=CLASSES, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)
        ), 256, 64),
    "convnext": Case(lambda: Segmenter("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)), 256, 64),
    "segformer": Case(
        lambda: segformer(
            depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], decoder_hidden_size=16,
            num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 1, 1],
        ), 256, 64),
}  # fmt: skip
# Of usual widths: activations are nearly all of their memory. Logits, which are few here, are whole on every rank.
LARGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: UNet(16, classes=2),
    "resnet50": lambda: timm.create_model("resnet50"),
    "convnext": lambda: Segmenter("convnext_atto", width=64, classes=2),
    "segformer": lambda: segformer(classes=2),
}


def spatial_labels(graph: Graph, ranks: int, letter: str = "y0") -> Mapping[str, str]:
    """Strategies that split a dim of every convolution's picture that they can split; other operations follow."""
    labels = {}
    for op in graph.ops:
        rule = rule_of(op, graph.shapes.__getitem__) if "conv" in op.target else None
        if rule is not None and strategy(rule, letter, ranks) is not None:
            labels[op.name] = letter
    return labels
