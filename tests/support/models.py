"""Small models with what pipeline splits get wrong: skips, ties, several inputs and outputs, side effects."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def tiny_vit(depth: int = 4, **kwargs) -> nn.Module:
    import timm

    settings: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "depth": depth,
        "embed_dim": 48,
        "num_heads": 3,
        "num_classes": 10,
    }
    return timm.create_model("vit_tiny_patch16_224", **(settings | kwargs))


def resnet18() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


class UNet(nn.Module):
    """Two skips, the outer one over the whole depth."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(first))
        deep = F.relu(self.middle(second)) + second
        return self.head(F.relu(self.merge(torch.cat([F.relu(self.up(deep)), first], 1))))


class Tied(nn.Module):
    """An embedding whose weight is the output projection too."""

    def __init__(self, tokens: int = 32, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class TwoInputs(nn.Module):
    """A keyword input used late, a constant, a buffer, and a dict of outputs, one of them made early."""

    scale: torch.Tensor
    hidden: torch.Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.ReLU(), nn.Flatten(2))
        self.middle = nn.Linear(width, width)
        self.text = nn.Linear(6, width)
        self.out = nn.Linear(width, 5)
        self.early = nn.Linear(width, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("hidden", torch.ones(width) * 2, persistent=False)

    def forward(self, image: torch.Tensor, *, text: torch.Tensor, gain: float = 1.0) -> dict[str, torch.Tensor]:
        tokens = self.image(image).transpose(1, 2)
        early = self.early(tokens.mean(1))
        x = F.gelu(self.middle(tokens * self.scale)).mean(1) * gain + torch.tensor([0.5])
        x = x + torch.tanh(self.text(text)) * self.hidden
        return {"class": self.out(x), "early": early, "features": x}


class Updating(nn.Module):
    """Updates in forward: a counter, a running mean under no_grad, and in-place operations on views."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = x - self.mean
        y = self.second(x)
        y[:, :3] += 1.0
        y += x
        y.relu_()
        return self.third(y)


class SharedModule(nn.Module):
    """A module that is called three times, between two that are called once."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.shared, self.leave = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.enter(x))
        for _ in range(3):
            x = x + torch.tanh(self.shared(x))
        return self.leave(x)


class ManyOutputs(nn.Module):
    """Two rows per sample, a table that ignores the input, a mean, a number; largest: a maximum over samples."""

    def __init__(self, largest: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.table = nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(3, 4)
        self.largest = largest

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = torch.relu(self.first(x))
        rows = self.second(h).reshape(-1, 4)
        outputs = {"rows": rows, "table": self.table.weight * 2, "penalty": h.square().mean(), "number": 3}
        return outputs | ({"largest": h.amax(0)} if self.largest else {})


class TwoHeads(nn.Module):
    """Two heads; the one that the loss may ignore reads a tensor that crosses cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        side = torch.tanh(self.side(x))
        main = torch.relu(self.middle(torch.relu(self.first(x))))
        return {"main": self.head(main), "other": self.other(side)}


def main_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["main"], target)


def loss_of_some(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Loss of the main head, and of the other one too if the first target is 0."""
    loss = main_loss(output, target)
    return loss + F.cross_entropy(output["other"], target) if target[0] == 0 else loss


class Normed(nn.Module):
    """Two convolutions, each followed by batch norm."""

    def __init__(self) -> None:
        super().__init__()
        convolve = functools.partial(nn.Conv1d, 8, 8, 1, bias=False)  # a bias would have no gradient but noise
        self.layers = nn.Sequential(convolve(), nn.BatchNorm1d(8), nn.ReLU(), convolve(), nn.BatchNorm1d(8))
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).flatten(1))


class Autocast(nn.Module):
    """A model whose forward runs under torch.autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", self.dtype):
            return self.model(*args)


def loss_in_bf16(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(output, target)


class ConvNet(nn.Module):
    """Convolutions, batch norm, an in-place ReLU and a shortcut."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width)
        self.conv, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = x + self.norm2(self.conv(x))
        return self.head(x.mean((2, 3)))
