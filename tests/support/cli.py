"""The command line run in this process, and the text of a user's module of models."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from autopar.tools.cli.app import app

USER_MODELS = '''\
import torch
from torch import nn


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return x


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.training:
            x = x + torch.rand_like(x)
        return {"a": self.second(x), "b": x}


class Drifting(nn.Module):
    """Counts its calls in plain Python, which a trace cannot see."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 8), nn.Linear(8, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.second(torch.relu(self.first(x))) * self.calls


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.words = nn.Linear(6, 8), nn.Linear(5, 8)

    def forward(self, image, words):
        return self.image(image) + self.words(words)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.words, self.out = nn.Linear(6, 8), nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, image, *, Tokens, scale=1.0):
        return self.out(torch.relu(self.image(image)) * scale + self.words(Tokens).mean(1))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, *xs):
        return self.second(torch.relu(self.first(sum(xs))))


class ChannelsLast(nn.Module):
    """Refuses images and weights in another memory format."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)

    def forward(self, x):
        for tensor in (x, self.conv.weight):
            if not tensor.is_contiguous(memory_format=torch.channels_last):
                raise ValueError(f"strides {tensor.stride()}")
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def linear(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def no_model():
    return 3
'''


def invoke(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(app, list(args), prog_name="autopar")
    return result.exit_code, result.stdout, re.sub(r"\s+", " ", result.stderr)
