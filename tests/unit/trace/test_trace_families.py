"""Traced graphs of many model families compute what the model computes, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from support.effort import only
from support.handmade import run_in_one_process
from support.models import SharedModule, Tied, UNet, Updating, resnet18, tiny_vit
from support.traced import Body, X
from torch import nn

from autopar.codegen.split import split
from autopar.ir.graph import Mode
from autopar.ir.pytree import leaves
from autopar.sharding.batch_join import may_mix_samples
from autopar.trace.trace import trace, weight_tensors


def image(side: int) -> torch.Tensor:
    return torch.randn(2, 3, side, side)


def mixed_precision(self: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.norm(self.lin(x))
    return torch.softmax(y.float(), -1)


def updated_under_no_grad(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    with torch.no_grad():
        y[:, 1:].mul_(2)
        self.lin.bias.clamp_(-0.1, 0.1)
    return y.exp() + self.lin(x)


def written_by_copy(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.copy_(self.lin(x))
    y[:, 0] = y[:, 1]
    return y * y


def default_probability(self: Body, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x) * torch.empty(2, 1).bernoulli_()


# Small members of families that trace differently; sizes as small as each allows.
FAMILIES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "unet": lambda: (UNet(), (image(8),)),
    "tied": lambda: (Tied(), (torch.randint(0, 32, (2, 5)),)),
    "updating": lambda: (Updating(), (torch.randn(2, 8),)),
    "shared": lambda: (SharedModule(), (torch.randn(2, 8),)),
    "autocast": lambda: (Body(mixed_precision, norm=nn.LayerNorm(4)), (X,)),
    "no_grad update": lambda: (Body(updated_under_no_grad), (X,)),
    "copy": lambda: (Body(written_by_copy), (X,)),
    "bernoulli": lambda: (Body(default_probability), (X,)),
    "spectral norm": lambda: (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))), (X,)),
    "lstm": lambda: (Body(lambda self, x: self.norm(x)[0], norm=nn.LSTM(4, 4)), (X[None],)),
    "resnet18": lambda: (resnet18(), (image(64),)),
    "vit with dropout": lambda: (tiny_vit(drop_path_rate=0.2, proj_drop_rate=0.1, attn_drop_rate=0.1), (image(32),)),
    "deit distilled": lambda: (timm.create_model("deit_tiny_distilled_patch16_224", img_size=32), (image(32),)),
    "eva": lambda: (timm.create_model("eva02_tiny_patch14_224", img_size=28), (image(28),)),
    "beit": lambda: (
        timm.create_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3),
        (image(32),),
    ),
    "swin": lambda: (
        timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
        ),
        (image(64),),
    ),
    "mixer": lambda: (timm.create_model("mixer_s32_224", img_size=64), (image(64),)),
    "convnext": lambda: (timm.create_model("test_convnext"), (image(64),)),
    "efficientnet": lambda: (timm.create_model("test_efficientnet"), (image(64),)),
    "regnet": lambda: (timm.create_model("test_byobnet"), (image(64),)),
    "levit": lambda: (timm.create_model("levit_128s"), (image(224),)),
    "coat": lambda: (timm.create_model("coat_lite_tiny", img_size=64), (image(64),)),
    "mobilevit": lambda: (timm.create_model("mobilevit_xxs"), (image(64),)),
    "maxxvit": lambda: (timm.create_model("coatnet_pico_rw_224", img_size=64), (image(64),)),
    "cpubone": lambda: (timm.create_model("cpubone_nano"), (image(64),)),
}  # fmt: skip


CELLS = [(family, mode) for family in FAMILIES for mode in ("train", "eval")]
SLOW = ("levit", "coat", "mobilevit", "maxxvit", "cpubone")
KEPT = [(name, "eval" if i % 3 == 2 else "train") for i, name in enumerate(FAMILIES) if name not in SLOW]


@pytest.mark.parametrize(("family", "mode"), only(KEPT, CELLS))
def test_one_stage_equals_the_model_to_the_last_bit(family: str, mode: Mode) -> None:
    torch.manual_seed(0)
    model, args = FAMILIES[family]()
    model.train(mode == "train")
    twin = copy.deepcopy(model)
    graph = trace(twin, args, mode=mode)
    programs = split(graph, {op.name: 0 for op in graph.ops}, 1)
    torch.manual_seed(1)  # the same random numbers in the same order
    actual = run_in_one_process(graph, programs, weight_tensors(twin, graph), *leaves(args))
    torch.manual_seed(1)
    expected = leaves(model(*args))
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))
    if mode == "train":
        if family != "vit with dropout":  # no graph of a plan has dropout within an operation
            assert may_mix_samples(graph) == (family == "lstm"), "it takes the first dim for time"
        torch.stack([t.square().mean() for t in actual]).sum().backward()
        torch.stack([t.square().mean() for t in expected]).sum().backward()
        for (name, a), b in zip(twin.named_parameters(), model.parameters()):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(twin.named_buffers(), model.buffers()):
        assert torch.equal(a, b), name
