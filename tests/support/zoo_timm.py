"""Rows of the zoo matrix for timm: one for each of its modules of architectures."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import timm
import torch
from timm.models import create_model
from torch import nn

from support.zoo_row import Inputs, ZooRow

# The model of each of timm's modules: the smallest one that people train.
TIMM: Mapping[str, str] = {
    "beit": "beit_base_patch16_224", "byoanet": "botnet26t_256", "byobnet": "resnet32ts", "cait": "cait_xxs24_224",
    "coat": "coat_tiny", "convit": "convit_tiny", "convmixer": "convmixer_768_32", "convnext": "convnext_atto",
    "cpubone": "cpubone_nano", "crossvit": "crossvit_tiny_240", "csatv2": "csatv2", "cspnet": "cs3darknet_focus_s",
    "cspnext": "cspnext_tiny", "davit": "davit_tiny", "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224", "densenet": "densenet121", "dla": "dla46x_c", "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small", "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0", "efficientnet": "efficientnet_b0", "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0", "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb", "fasternet": "fasternet_t0", "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf", "gcvit": "gcvit_xxtiny", "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050", "hardcorenas": "hardcorenas_b", "hgnet": "hgnetv2_b0", "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny", "hrnet": "hrnet_w18_small", "iformer": "iformer_t",
    "inception_next": "inception_next_atto", "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3", "inception_v4": "inception_v4", "lcnetv2": "lcnetv2_small", "levit": "levit_128s",
    "lowformer": "lowformer_b0", "mambaout": "mambaout_femto", "maxxvit": "coatnet_pico_rw_224",
    "metaformer": "poolformerv2_s12", "mlp_mixer": "gmlp_ti16_224", "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base", "mobilevit": "mobilevit_xxs", "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_parfac_gap", "nasnet": "nasnetalarge", "nest": "nest_tiny",
    "nextvit": "nextvit_small", "nfnet": "nf_regnet_b0", "pit": "pit_ti_224", "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0", "qwen3_vit": "qwen3_vit_88m", "rdnet": "rdnet_tiny", "regnet": "regnetx_002",
    "repghost": "repghostnet_050", "repvit": "repvit_m1", "res2net": "res2next50", "resnest": "resnest14d",
    "resnet": "resnet18", "resnetv2": "resnetv2_18", "rexnet": "rexnet_100", "selecsls": "selecsls42",
    "senet": "legacy_seresnet18", "sequencer": "sequencer2d_s", "shvit": "shvit_s1", "sknet": "skresnet18",
    "starnet": "starnet_s050", "swiftformer": "swiftformer_xs", "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256", "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224", "tnt": "tnt_s_legacy_patch16_224", "tresnet": "tresnet_m",
    "twins": "twins_svt_small", "vgg": "vgg11", "visformer": "visformer_tiny",
    "vision_transformer": "vit_tiny_patch16_224", "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "vit_relpos_small_patch16_224", "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224", "volo": "volo_d1_224", "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception", "xception_aligned": "xception41p", "xcit": "xcit_nano_12_p8_224",
}  # fmt: skip
SIDES = (64, 96, 128, 160, 192, 224, 256)  # of small images, pixel
FEW_BLOCKS: Sequence[dict[str, Any]] = ({"depth": 4}, {"depths": (1, 1, 2, 1)}, {})
NARROW: Mapping[str, dict[str, Any]] = {"vgg11": {"mlp_ratio": 1 / 64}}  # of layers with most of a model's weights
# The first of these that a model takes.
RATES: Sequence[dict[str, Any]] = ({"drop_rate": 0.1, "drop_path_rate": 0.1}, {"drop_rate": 0.1}, {})


def timm_row(family: str, name: str) -> ZooRow:
    """The row of a module of timm."""

    def planned(batch: int) -> tuple[nn.Module, Inputs]:
        with torch.device("meta"):
            model = create_model(name)
        return model, ((torch.empty(batch, *input_size(name), device="meta"),), {})

    def inputs(batch: int) -> Inputs:
        side = smallest(name)[1]
        return (torch.randn(batch, 3, side, side),), {}

    def build(rates: Sequence[dict[str, Any]]) -> nn.Module:
        arguments = smallest(name)[0]
        for given in rates:
            torch.manual_seed(0)
            with suppress(TypeError):  # no such argument
                return create_model(name, **arguments, **given)
        raise AssertionError(f"{name} takes none of {rates}")

    return ZooRow(
        "timm", family, name, lambda: build(({"drop_path_rate": 0.0}, {})), inputs, lambda: build(RATES), planned
    )


def input_size(name: str) -> tuple[int, ...]:
    """Channels, height and width of the images that a model expects."""
    config = timm.get_pretrained_cfg(name)
    return config.input_size if config is not None else (3, 224, 224)


@functools.cache
def smallest(name: str) -> tuple[dict[str, Any], int]:
    """Arguments of the model for its smallest images of SIDES, and their side; its own size if it takes none of them.

    It has few blocks, or narrow layers, if there is an argument for that.
    """
    sides = (*SIDES, max(input_size(name)[1:]))
    for device, side in product(("meta", "cpu"), sides):  # few models do not run on the meta device
        sizes: Sequence[dict[str, Any]] = ({"img_size": side}, {})
        for fewer, sized in product((NARROW[name],) if name in NARROW else FEW_BLOCKS, sizes):
            try:
                with torch.no_grad(), torch.device(device):
                    create_model(name, **fewer, **sized)(torch.randn(2, 3, side, side))
            except Exception:  # models refuse sizes and arguments in many ways
                continue
            return fewer | sized, side
    raise AssertionError(f"{name} takes none of {sides}")


ROWS = tuple(timm_row(family, name) for family, name in TIMM.items())
