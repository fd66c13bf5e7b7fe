"""Rows of the zoo matrix: vision models of Hugging Face's transformers and diffusers, by small configurations."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from support.zoo_row import Inputs, ZooRow, pixels

VIT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [4, 8], "window_size": 4}
SWIN_STAGES: dict[str, Any] = SWIN | {
    "image_size": 64, "depths": [1, 1, 1, 1], "num_heads": [4, 4, 8, 8], "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
LOSS_OUTSIDE = "all but the loss, which divides by a count of the batch: write it as loss_fn"
MASKED_BY_VALUE = (
    "its forward keeps tokens by a boolean mask (embeddings[~bool_masked_pos]), so their number depends on values; "
    "it would have to gather by the indices of so many visible tokens, as ViT-MAE does"
)
CONTRASTIVE = "contrastive loss over the global batch as loss_fn, its temperature fixed"
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 8, "eos_token_id": 63, "bos_token_id": 62,
}  # fmt: skip


def of(name: str, config: str, **settings: Any) -> nn.Module:
    """A model with random weights, by the names of its class and of its configuration's class."""
    return getattr(transformers, name)(configured(config, **settings))


def configured(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


def diffused(name: str, **settings: Any) -> nn.Module:
    """A model of diffusers with random weights, by the name of its class."""
    return getattr(importlib.import_module("diffusers"), name)(**settings)


def convnext_v2() -> nn.Module:
    sizes = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 2, 1]}
    return of("ConvNextV2ForImageClassification", "ConvNextV2Config", image_size=32, num_labels=10, **sizes)


def segformer() -> nn.Module:
    sizes = {"hidden_sizes": [32, 32, 64, 64], "num_attention_heads": [4, 4, 4, 4], "depths": [1, 1, 1, 1]}
    return of("SegformerForSemanticSegmentation", "SegformerConfig", decoder_hidden_size=32, num_labels=3, **sizes)


def maskformer() -> nn.Module:
    decoder = configured(
        "DetrConfig",
        d_model=32,
        encoder_layers=0,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        num_queries=8,
    )
    return of(
        "MaskFormerForInstanceSegmentation", "MaskFormerConfig", backbone_config=configured("SwinConfig",
        **SWIN_STAGES),
        decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=3,
    )  # fmt: skip


def mask2former() -> nn.Module:
    return of(
        "Mask2FormerForUniversalSegmentation", "Mask2FormerConfig",
        backbone_config=configured("SwinConfig", **SWIN_STAGES), feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=64, encoder_layers=2, decoder_layers=3, num_attention_heads=4, dim_feedforward=64,
        num_queries=8, num_labels=3,
    )  # fmt: skip


def detr() -> nn.Module:
    backbone = configured("ResNetConfig", **RESNET, out_features=["stage4"])
    model: Any = of(
        "DetrForObjectDetection", "DetrConfig", backbone_config=backbone, d_model=32, num_queries=8, num_labels=3,
        encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=64,
    )  # fmt: skip
    model.model.unfreeze_backbone()
    return model


def rt_detr() -> nn.Module:
    backbone = configured("RTDetrResNetConfig", **RESNET, out_features=["stage2", "stage3", "stage4"])
    return of(
        "RTDetrForObjectDetection", "RTDetrConfig", backbone_config=backbone, encoder_hidden_dim=32,
        encoder_in_channels=[16, 32, 64], encoder_ffn_dim=64, encoder_attention_heads=4, d_model=32, num_queries=8,
        decoder_in_channels=[32, 32, 32], decoder_ffn_dim=64, decoder_layers=2, decoder_attention_heads=4,
        num_denoising=0, num_labels=3, freeze_backbone_batch_norms=False,
    )  # fmt: skip


def sam() -> nn.Module:
    sizes = VIT | {"image_size": 64, "patch_size": 16, "mlp_dim": 64}
    sizes.pop("intermediate_size")
    return of(
        "SamVisionModel", "SamVisionConfig", **sizes, output_channels=16, window_size=2, global_attn_indexes=[1, 3],
        num_pos_feats=8, initializer_range=0.02,
    )  # fmt: skip


def sam2() -> nn.Module:
    backbone = configured(
        "Sam2HieraDetConfig", hidden_size=16, num_attention_heads=4, image_size=[64, 64], num_query_pool_stages=3,
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[4, 4, 8, 8],
        window_size_per_stage=[4, 4, 4, 2], global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
    )  # fmt: skip
    return of(
        "Sam2VisionModel", "Sam2VisionConfig", backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]], fpn_hidden_size=32,
    )  # fmt: skip


def depth_anything() -> nn.Module:
    backbone = configured(
        "Dinov2Config", hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=56,
        patch_size=14, apply_layernorm=True,
        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
    )  # fmt: skip
    return of(
        "DepthAnythingForDepthEstimation", "DepthAnythingConfig", backbone_config=backbone, reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 16, 32, 32], fusion_hidden_size=16, head_hidden_size=8,
    )  # fmt: skip


def mae(name: str, config: str, **settings: Any) -> nn.Module:
    decoder = {
        "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
    }  # fmt: skip
    return of(name, config, **VIT, **decoder, **settings)


def vit_mae() -> nn.Module:
    return Outputs(mae("ViTMAEForPreTraining", "ViTMAEConfig"), "logits", "mask")


def vit_mae_inputs(batch: int) -> Inputs:
    """Images, and the noise [batch, 16] whose order chooses the masked patches."""
    return (), {"pixel_values": torch.randn(batch, 3, 32, 32), "noise": torch.rand(batch, 16)}


def video_mae_inputs(batch: int) -> Inputs:
    """Clips of 4 frames, and masks [batch, 32] that hide 24 of their patches."""
    hidden = torch.rand(batch, 32).argsort(1) < 24
    return (), {"pixel_values": torch.randn(batch, 4, 3, 32, 32), "bool_masked_pos": hidden}


def clip_of_4(batch: int) -> Inputs:
    return (), {"pixel_values": torch.randn(batch, 4, 3, 32, 32)}


class Outputs(nn.Module):
    """A model without those of its outputs that mix samples, such as a loss that divides by a count of the batch."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.model(**inputs)
        return {name: output[name] for name in self.names}


def clip() -> nn.Module:
    whole = of("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=VIT, projection_dim=16)
    return Outputs(whole, "image_embeds", "text_embeds")


def clip_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The symmetric cross entropy of `CLIPModel`, at its initial temperature, over all pairs of the batch."""
    similarities = output["text_embeds"] @ output["image_embeds"].T / 0.07
    places = torch.arange(len(similarities))
    return (F.cross_entropy(similarities, places) + F.cross_entropy(similarities.T, places)) / 2


def clip_inputs(batch: int) -> Inputs:
    """Images, and texts of 8 tokens that end with 63."""
    tokens = torch.randint(0, 60, (batch, 8))
    tokens[:, -1] = 63
    return (), {"input_ids": tokens, "pixel_values": torch.randn(batch, 3, 32, 32)}


# -- diffusers --------------------------------------------------------------------------------------------------------


def dit() -> nn.Module:
    return diffused(
        "DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=4,
        norm_num_groups=4, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip


def unet() -> nn.Module:
    return diffused(
        "UNet2DModel", sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def conditional_unet() -> nn.Module:
    return diffused(
        "UNet2DConditionModel", sample_size=16, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=4, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return diffused(
        "AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), norm_num_groups=4, latent_channels=4,
    )  # fmt: skip


def dit_inputs(batch: int) -> Inputs:
    """Noisy latents, their times, and classes."""
    times, classes = torch.randint(0, 1000, (batch,)), torch.randint(0, 10, (batch,))
    return (), {"hidden_states": torch.randn(batch, 4, 8, 8), "timestep": times, "class_labels": classes}


def unet_inputs(channels: int, context: bool) -> Callable[[int], Inputs]:
    """Noisy images or latents, their times, and with a context the text's 6 tokens."""

    def inputs(batch: int) -> Inputs:
        noisy, times = torch.randn(batch, channels, 16, 16), torch.randint(0, 1000, (batch,))
        text = {"encoder_hidden_states": torch.randn(batch, 6, 16)} if context else {}
        return (), {"sample": noisy, "timestep": times, **text}

    return inputs


def row(
    family: str, name: str, build: Callable[[], nn.Module], inputs: Callable[[int], Inputs], part: str = ""
) -> ZooRow:
    return ZooRow("Hugging Face", family, name, build, inputs, part=part)


def by_config(family: str, name: str, config: str, **settings: Any) -> ZooRow:
    """Row of a model on images of 32 × 32 that needs no more than a configuration."""
    return row(family, name, partial(of, name, config, **settings), pixels(32))


HUGGING_FACE = (
    by_config("ViT", "ViTForImageClassification", "ViTConfig", **VIT, num_labels=10),
    by_config("DeiT", "DeiTForImageClassificationWithTeacher", "DeiTConfig", **VIT, num_labels=10),
    by_config("Swin", "SwinForImageClassification", "SwinConfig", **SWIN, num_labels=10),
    by_config("Swin v2", "Swinv2ForImageClassification", "Swinv2Config", **SWIN, num_labels=10),
    by_config("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", **VIT, num_labels=10),
    by_config("DINOv3 ViT", "DINOv3ViTModel", "DINOv3ViTConfig", **VIT, num_register_tokens=2, pos_embed_rescale=None),
    by_config(
        "DINOv3 ConvNeXt", "DINOv3ConvNextModel", "DINOv3ConvNextConfig", hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 2, 1],
    ),
    by_config("SigLIP vision tower", "SiglipVisionModel", "SiglipVisionConfig", **VIT),
    by_config("CLIP vision tower", "CLIPVisionModel", "CLIPVisionConfig", **VIT),
    by_config(
        "BEiT", "BeitForImageClassification", "BeitConfig", **VIT, use_relative_position_bias=True, num_labels=10
    ),
    ZooRow("Hugging Face", "CLIP", "CLIPModel", clip, clip_inputs, loss=clip_loss, part=CONTRASTIVE),
    row("ConvNeXt v2", "ConvNextV2ForImageClassification", convnext_v2, pixels(32)),
    row("SegFormer", "SegformerForSemanticSegmentation", segformer, pixels(64)),
    row("MaskFormer", "MaskFormerForInstanceSegmentation", maskformer, pixels(64)),
    row("Mask2Former", "Mask2FormerForUniversalSegmentation", mask2former, pixels(64)),
    row("DETR", "DetrForObjectDetection", detr, pixels(64)),
    row("RT-DETR", "RTDetrForObjectDetection", rt_detr, pixels(64)),
    row("SAM image encoder", "SamVisionModel", sam, pixels(64)),
    row("SAM 2 image encoder", "Sam2VisionModel", sam2, pixels(64)),
    row("Depth Anything", "DepthAnythingForDepthEstimation", depth_anything, pixels(56)),
    row("ViT-MAE", "ViTMAEForPreTraining", vit_mae, vit_mae_inputs, LOSS_OUTSIDE),
    ZooRow(
        "Hugging Face", "VideoMAE pre-training", "VideoMAEForPreTraining",
        partial(mae, "VideoMAEForPreTraining", "VideoMAEConfig", num_frames=4), video_mae_inputs,
        blocked=MASKED_BY_VALUE,
    ),
    row(
        "VideoMAE", "VideoMAEForVideoClassification",
        partial(of, "VideoMAEForVideoClassification", "VideoMAEConfig", **VIT, num_frames=4, num_labels=10),
        clip_of_4,
    ),
)  # fmt: skip
if importlib.util.find_spec("diffusers"):
    HUGGING_FACE += (
        row("diffusers DiT", "DiTTransformer2DModel", dit, dit_inputs),
        row("diffusers U-Net", "UNet2DModel", unet, unet_inputs(3, False)),
        row("diffusers U-Net with text", "UNet2DConditionModel", conditional_unet, unet_inputs(4, True)),
        row(
            "diffusers VAE", "AutoencoderKL", autoencoder, lambda batch: ((), {"sample": torch.randn(batch, 3, 32, 32)})
        ),
    )
