"""Rows of the zoo matrix: every family of torchvision's models, in small versions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torchvision.models import alexnet as make_alexnet
from torchvision.models import (
    convnext,
    densenet,
    detection,
    efficientnet,
    inception_v3,
    maxvit,
    mnasnet0_5,
    mobilenet_v2,
    mobilenet_v3_small,
    quantization,
    regnet,
    resnet,
    segmentation,
    shufflenet_v2_x0_5,
    squeezenet1_1,
    swin_transformer,
    vgg,
    video,
    vision_transformer,
)
from torchvision.models import googlenet as make_googlenet
from torchvision.models.detection import anchor_utils, backbone_utils, fcos, retinanet, ssd
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.optical_flow import raft
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.models.video import mvit
from torchvision.models.video import resnet as video_resnet
from torchvision.models.video import swin_transformer as swin3d
from torchvision.ops import MultiScaleRoIAlign

from support.zoo_row import Inputs, ZooRow, clips, images

CLASSES = 10
ONE_STAGE = "backbone and heads; resizing, anchors, matching and losses stay outside"
TWO_STAGE = "backbone, FPN and RPN head; proposals, RoI heads and losses stay outside"


# -- classification ---------------------------------------------------------------------------------------------------


def narrow(model: Any, channels: int, side: int) -> nn.Module:
    """AlexNet or VGG with 64 instead of 4096 features between the linear layers of its classifier."""
    linear = [i for i, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
    widths = [channels * side * side, 64, 64, CLASSES]
    for i, width, following in zip(linear, widths, widths[1:]):
        model.classifier[i] = nn.Linear(width, following)
    return model


def alexnet() -> nn.Module:
    return narrow(make_alexnet(num_classes=CLASSES), 256, 6)


def convnext_small() -> nn.Module:
    block = convnext.CNBlockConfig
    stages = [block(16, 32, 2), block(32, 64, 2), block(64, None, 2)]
    return convnext.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=CLASSES)


def densenet_small() -> nn.Module:
    return densenet.DenseNet(8, (1, 1, 2, 2), 16, num_classes=CLASSES, drop_rate=0.1)


def efficientnet_small() -> nn.Module:
    fused = efficientnet.FusedMBConvConfig(2, 3, 2, 16, 16, 2)
    stages = [fused, efficientnet.MBConvConfig(4, 3, 2, 16, 32, 2, 1.0, 1.0)]
    return efficientnet.EfficientNet(stages, dropout=0.2, num_classes=CLASSES, last_channel=64)


def googlenet() -> nn.Module:
    return make_googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False)


def inception() -> nn.Module:
    return inception_v3(num_classes=CLASSES, aux_logits=False, init_weights=False)


def maxvit_small() -> nn.Module:
    return maxvit.MaxVit((32, 32), 16, 2, [16, 32], [1, 1], 8, 0.1, num_classes=CLASSES)


def regnet_small() -> nn.Module:
    stages = regnet.BlockParams.from_init_params(depth=6, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return regnet.RegNet(stages, num_classes=CLASSES)


def resnet_small() -> nn.Module:
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def resnext_small() -> nn.Module:
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=8, width_per_group=8)


def swin(block: Callable[..., nn.Module], merging: Callable[..., nn.Module]) -> nn.Module:
    return swin_transformer.SwinTransformer(
        [4, 4], 32, [2, 2], [4, 8], [4, 4], num_classes=CLASSES, block=block, downsample_layer=merging
    )


def swin_v1() -> nn.Module:
    return swin(swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging)


def swin_v2() -> nn.Module:
    return swin(swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2)


def vgg_small() -> nn.Module:
    features = vgg.make_layers([16, "M", 32, "M", 64, 64, "M", 64, "M"], batch_norm=True)
    return narrow(vgg.VGG(features, init_weights=False), 64, 7)


def vit() -> nn.Module:
    return vision_transformer.VisionTransformer(32, 8, 4, 4, 32, 64, dropout=0.1, num_classes=CLASSES)


def quantizable_resnet() -> nn.Module:
    return quantization.resnet18(num_classes=CLASSES, quantize=False)


# -- segmentation -----------------------------------------------------------------------------------------------------


def fcn() -> nn.Module:
    dilated = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=[False, True, True])
    features = create_feature_extractor(dilated, {"layer4": "out", "layer3": "aux"})
    return FCN(features, FCNHead(2048, 3), FCNHead(1024, 3))


def deeplab() -> nn.Module:
    make = segmentation.deeplabv3_mobilenet_v3_large
    return make(weights=None, weights_backbone=None, num_classes=3, aux_loss=True)


def lraspp() -> nn.Module:
    return segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)


# -- detection --------------------------------------------------------------------------------------------------------


class OneStage(nn.Module):
    """Backbone and heads of a detector, for images of one size; the head's outputs are the inputs of its losses."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        return self.head(list(self.backbone(pictures).values()))


class TwoStage(nn.Module):
    """Backbone and RPN head of an R-CNN: objectness and boxes of each level, and the features for the RoI heads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.rpn.head

    def forward(self, pictures: Tensor) -> dict[str, Any]:
        features = self.backbone(pictures)
        objectness, boxes = self.head(list(features.values()))
        return {"features": features, "objectness": objectness, "boxes": boxes}


def fpn() -> nn.Module:
    """A narrow feature pyramid on a ResNet with one block a stage."""
    layers = {f"layer{i}": str(i - 1) for i in range(1, 5)}
    return backbone_utils.BackboneWithFPN(resnet_small(), layers, [64, 128, 256, 512], 32)


def faster_rcnn() -> nn.Module:
    return TwoStage(detection.FasterRCNN(fpn(), 3, box_detections_per_img=8))


def mask_rcnn() -> nn.Module:
    return TwoStage(detection.MaskRCNN(fpn(), 3, mask_roi_pool=MultiScaleRoIAlign(["0", "1"], 14, 2)))


def keypoint_rcnn() -> nn.Module:
    return TwoStage(detection.KeypointRCNN(fpn(), 2, num_keypoints=5))


def retinanet_small() -> nn.Module:
    sizes = tuple((s, int(s * 1.3), int(s * 1.6)) for s in (16, 32, 64, 128, 256))
    anchors = anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    return OneStage(retinanet.RetinaNet(fpn(), 3, anchor_generator=anchors))


def fcos_small() -> nn.Module:
    anchors = anchor_utils.AnchorGenerator(((8,), (16,), (32,), (64,), (128,)), ((1.0,),) * 5)
    return OneStage(fcos.FCOS(fpn(), 3, anchor_generator=anchors))


def ssd_small() -> nn.Module:
    """SSD300 with narrow layers between those whose width torchvision fixes."""
    plan = [8, 8, "M", 16, 16, "M", 32, 32, 32, "M", 32, 32, 512, "M", 32, 32, 512, "M"]
    backbone = vgg.VGG(vgg.make_layers(plan, batch_norm=False), init_weights=False)
    anchors = anchor_utils.DefaultBoxGenerator([[2], [2, 3], [2, 3], [2, 3], [2], [2]])
    features = ssd.SSDFeatureExtractorVGG(backbone.features, highres=False)
    return OneStage(ssd.SSD(features, anchors, (300, 300), 3))


def ssdlite() -> nn.Module:
    return OneStage(detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3))


# -- video and optical flow -------------------------------------------------------------------------------------------


def video_resnet_small(*convolutions: Any, stem: Any = video_resnet.BasicStem) -> nn.Module:
    return video_resnet.VideoResNet(video_resnet.BasicBlock, list(convolutions), [1, 1, 1, 1], stem, CLASSES)


def r3d() -> nn.Module:
    return video_resnet_small(*[video_resnet.Conv3DSimple] * 4)


def mc3() -> nn.Module:
    return video_resnet_small(video_resnet.Conv3DSimple, *[video_resnet.Conv3DNoTemporal] * 3)


def r2plus1d() -> nn.Module:
    return video_resnet_small(*[video_resnet.Conv2Plus1D] * 4, stem=video_resnet.R2Plus1dStem)


def s3d_small_clip() -> nn.Module:
    """S3D for clips of less than 14 frames of 224 × 224."""
    model: Any = video.s3d(num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool3d(1)
    return model


def mvit_blocks(second: bool) -> nn.Module:
    """MViT v1 (absolute positions, pooling with the class token) or v2 (relative positions, residual pooling)."""
    kernel, one, two = [3, 3, 3], [1, 1, 1], [1, 2, 2]
    blocks = [
        mvit.MSBlockConfig(4, 32, 32, kernel, kernel, one, two),
        mvit.MSBlockConfig(4, 32, 64, kernel, kernel, two, one),
        mvit.MSBlockConfig(8, 64, 64, kernel, kernel, one, one),
        mvit.MSBlockConfig(8, 64, 64, kernel, kernel, one, one),
    ]
    return mvit.MViT(
        (32, 32), 4, blocks, residual_pool=second, residual_with_cls_embed=not second, rel_pos_embed=second,
        proj_after_attn=second, dropout=0.1, stochastic_depth_prob=0.1, num_classes=CLASSES,
    )  # fmt: skip


def swin3d_small() -> nn.Module:
    return swin3d.SwinTransformer3d([2, 4, 4], 32, [2, 2], [4, 8], [2, 4, 4], num_classes=CLASSES)


class Raft(nn.Module):
    """RAFT with coordinates in the images' dtype: torchvision makes them in float32, which float64 weights refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.model = raft.raft_small()

    def forward(self, first: Tensor, second: Tensor, num_flow_updates: int) -> list[Tensor]:
        original = raft.make_coords_grid

        def grid(*sizes: Any, **device: Any) -> Tensor:
            return original(*sizes, **device).to(first.dtype)

        with mock.patch.object(raft, "make_coords_grid", grid):
            return self.model(first, second, num_flow_updates)


def pairs(side: int) -> Callable[[int], Inputs]:
    """Two images [batch, 3, side, side] each, with flow between them to find."""
    return lambda batch: ((torch.rand(batch, 3, side, side) * 2 - 1, torch.rand(batch, 3, side, side) * 2 - 1, 2), {})


def row(
    family: str, name: str, build: Callable[[], nn.Module], inputs: Callable[[int], Inputs], part: str = ""
) -> ZooRow:
    return ZooRow("torchvision", family, f"torchvision:{name}", build, inputs, part=part)


TORCHVISION = (
    row("alexnet", "alexnet", alexnet, images(64)),
    row("convnext", "convnext_tiny", convnext_small, images(32)),
    row("densenet", "densenet121", densenet_small, images(32)),
    row("efficientnet (v1, v2)", "efficientnet_b0", efficientnet_small, images(32)),
    row("googlenet", "googlenet", googlenet, images(64)),
    row("inception", "inception_v3", inception, images(96)),
    row("maxvit", "maxvit_t", maxvit_small, images(32)),
    row("mnasnet", "mnasnet0_5", partial(mnasnet0_5, num_classes=CLASSES), images(32)),
    row("mobilenetv2", "mobilenet_v2", partial(mobilenet_v2, num_classes=CLASSES, width_mult=0.25), images(32)),
    row("mobilenetv3", "mobilenet_v3_small", partial(mobilenet_v3_small, num_classes=CLASSES), images(32)),
    row("regnet (x, y)", "regnet_y_400mf", regnet_small, images(32)),
    row("resnet", "resnet18", resnet_small, images(32)),
    row("resnext, wide resnet", "resnext50_32x4d", resnext_small, images(32)),
    row("shufflenetv2", "shufflenet_v2_x0_5", partial(shufflenet_v2_x0_5, num_classes=CLASSES), images(32)),
    row("squeezenet", "squeezenet1_1", partial(squeezenet1_1, num_classes=CLASSES), images(64)),
    row("swin", "swin_t", swin_v1, images(32)),
    row("swin v2", "swin_v2_t", swin_v2, images(32)),
    row("vgg", "vgg11_bn", vgg_small, images(32)),
    row("vit", "vit_b_16", vit, images(32)),
    row("quantization (before conversion)", "quantized_resnet18", quantizable_resnet, images(32)),
    row("deeplabv3", "deeplabv3_mobilenet_v3_large", deeplab, images(32)),
    row("fcn", "fcn_resnet50", fcn, images(32)),
    row("lraspp", "lraspp_mobilenet_v3_large", lraspp, images(32)),
    row("fasterrcnn", "fasterrcnn_resnet50_fpn", faster_rcnn, images(64), TWO_STAGE),
    row("maskrcnn", "maskrcnn_resnet50_fpn", mask_rcnn, images(64), TWO_STAGE),
    row("keypointrcnn", "keypointrcnn_resnet50_fpn", keypoint_rcnn, images(64), TWO_STAGE),
    row("retinanet", "retinanet_resnet50_fpn", retinanet_small, images(64), ONE_STAGE),
    # At 64 px the coarsest level is one pixel, which group norms make a zero, or its rounding error, before a ReLU.
    row("fcos", "fcos_resnet50_fpn", fcos_small, images(256), ONE_STAGE),
    row("ssd", "ssd300_vgg16", ssd_small, images(300), ONE_STAGE),
    row("ssdlite", "ssdlite320_mobilenet_v3_large", ssdlite, images(64), ONE_STAGE),
    row("r3d", "r3d_18", r3d, clips(4, 32)),
    row("mc3", "mc3_18", mc3, clips(4, 32)),
    row("r2plus1d", "r2plus1d_18", r2plus1d, clips(4, 32)),
    row("s3d", "s3d", s3d_small_clip, clips(8, 64)),
    row("mvit", "mvit_v1_b", partial(mvit_blocks, False), clips(4, 32)),
    row("mvit v2", "mvit_v2_s", partial(mvit_blocks, True), clips(4, 32)),
    row("swin3d", "swin3d_t", swin3d_small, clips(4, 32)),
    row("raft", "raft_small", Raft, pairs(128)),
)
