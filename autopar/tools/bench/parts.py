"""A model's repeated blocks, and timm's models as a sequence of modules: stem, blocks, head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo.config
from torch import nn

from autopar.tools.bench.baselines.registry import NotExpressible

MIN_BLOCK_SHARE = 0.5  # share of a model's parameters that its blocks must hold
RECOMPILE_LIMIT = 64  # ResNet's blocks are one class in a dozen shapes; torch's limit of 8 would leave some uncompiled


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: instances of one class that hold at least MIN_BLOCK_SHARE of the parameters.

    Of several such classes the one with most instances counts. A model without repetition is its own only block.
    """
    total = sum(p.numel() for p in model.parameters())
    by_class: dict[type, list[nn.Module]] = {}
    for module in outermost(model):
        by_class.setdefault(type(module), []).append(module)
    candidates = [
        modules
        for modules in by_class.values()
        if len(modules) > 1 and sum(p.numel() for m in modules for p in m.parameters()) >= MIN_BLOCK_SHARE * total
    ]
    return max(candidates, key=len, default=[model])


def outermost(model: nn.Module) -> Iterable[nn.Module]:
    """Modules that have children and lie inside no other module of their class."""

    def walk(module: nn.Module, around: frozenset[type]) -> Iterable[nn.Module]:
        for child in module.children():
            if any(True for _ in child.children()) and type(child) not in around:
                yield child
            yield from walk(child, around | {type(child)})

    containers = (nn.Sequential, nn.ModuleList)
    return (module for module in walk(model, frozenset()) if not isinstance(module, containers))


def compile_blocks(modules: Iterable[nn.Module]) -> None:
    """Compile the forward of each block in place; blocks of one shape share a compilation.

    The forward is compiled and not the module, so that hooks (FSDP2's) stay outside.
    """
    # torch.compile has an argument for the limit only from torch 2.15 on.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for block in modules:
        block.forward = torch.compile(block.forward)


class WithRope(nn.Module):
    """A block of timm's Eva with the rotary embedding, which the model passes to all blocks."""

    def __init__(self, block: nn.Module, rope: torch.Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, rope=self.rope)


class ModelFunction(nn.Module):
    """A part of a model's forward as a module.

    Args:
        function: called with the owner and the input.
        owner: a copy of the model with only the modules and parameters that the function uses.
    """

    def __init__(self, function: Callable[..., Any], needs: nn.Module) -> None:
        super().__init__()
        self.owner = needs
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.owner, x)


def sequence(model: nn.Module) -> list[nn.Module]:
    """A timm ViT, Eva or ResNet as stem, blocks and head, to be called one after the other.

    Stem and head run the model's code on a copy of the model without the modules that they do not use.

    Raises:
        NotExpressible: the model is another one.
    """
    try:
        from timm.models.eva import Eva
        from timm.models.resnet import ResNet
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise NotExpressible(f"the split of a model into blocks needs timm: {error}") from error
    if isinstance(model, VisionTransformer):
        inner = list(model.blocks)
        head = ("norm", "attn_pool", "fc_norm", "head_drop", "head")
        return [
            ModelFunction(vit_stem, without_children(model, ("blocks", *head))),
            *inner,
            ModelFunction(vit_head, with_only_children(model, head)),
        ]
    if isinstance(model, Eva) and not getattr(model, "rope_mixed", False):
        head = ("norm", "attn_pool", "fc_norm", "head_drop", "head")
        stem = without_children(model, ("blocks", *head))
        rope = stem._pos_embed(stem.patch_embed(example_image(model)))[1]
        inner = [block if rope is None else WithRope(block, rope.detach()) for block in model.blocks]
        return [ModelFunction(eva_stem, stem), *inner, ModelFunction(vit_head, with_only_children(model, head))]
    if isinstance(model, ResNet):
        layers = [name for name, _ in model.named_children() if name.startswith("layer")]
        inner = [block for name in layers for block in model.get_submodule(name).children()]
        head = ("global_pool", "fc")
        return [
            ModelFunction(resnet_stem, without_children(model, (*layers, *head))),
            *inner,
            ModelFunction(resnet_head, with_only_children(model, head)),
        ]
    raise NotExpressible(
        f"there is no split of {type(model).__name__} into blocks; timm's ViTs, Evas and ResNets have one"
    )


def example_image(model: Any) -> torch.Tensor:
    """A batch of one image for a ViT, [1, channels, height, width]."""
    parameter = next(model.parameters())
    return torch.zeros(1, model.patch_embed.proj.in_channels, *model.patch_embed.img_size, device=parameter.device)


def without_children(model: nn.Module, names: Iterable[str]) -> Any:
    """A copy of the model without some of its children; it shares the others."""
    copy = model.__new__(type(model))
    copy.__dict__ = model.__dict__ | {"_modules": {n: m for n, m in model.named_children() if n not in names}}
    return copy


def with_only_children(model: nn.Module, names: Iterable[str]) -> Any:
    """A copy of the model with only some of its children, and without parameters outside of them."""
    copy = without_children(model, {n for n, _ in model.named_children()} - set(names))
    copy.__dict__["_parameters"] = {}
    return copy


def vit_stem(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))


def eva_stem(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.norm_pre(model._pos_embed(model.patch_embed(x))[0])


def vit_head(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.forward_head(model.norm(x))


def resnet_stem(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.maxpool(model.act1(model.bn1(model.conv1(x))))


def resnet_head(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.forward_head(x)
