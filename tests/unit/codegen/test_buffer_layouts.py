"""Code that inductor generates for a GPU, without one (`support.gpu_code`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

TESTS = Path(__file__).parents[2]


class Gated(nn.Module):
    """A block of MaxViT: the gradient of its second norm's result has two parts, that of its first is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 256, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(256), nn.BatchNorm2d(256)
        self.deep = nn.Conv2d(256, 256, 3, padding=1, groups=256, bias=False)
        self.gate = nn.Sequential(nn.Conv2d(256, 16, 1), nn.SiLU(), nn.Conv2d(16, 256, 1), nn.Sigmoid())
        self.act, self.narrow, self.head = nn.GELU(approximate="tanh"), nn.Conv2d(256, 64, 1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm1(self.wide(self.stem(x))))
        x = self.act(self.norm2(self.deep(nn.functional.pad(x, (0, 1, 0, 1)))))
        return self.head(self.narrow(x * self.gate(x.mean((2, 3), keepdim=True))).mean((2, 3)))


@pytest.mark.full
def test_gradients_of_norms_are_stored_in_channels_last(tmp_path: Path) -> None:
    """Without `autopar.codegen.buffer_layouts` some of them are contiguous."""
    path = os.pathsep.join((str(TESTS), str(TESTS.parent), str(Path(__file__).parent)))
    command = [sys.executable, "-m", "support.gpu_code", "test_buffer_layouts:Gated", "64", "--img-size", "112"]
    subprocess.run([*command, "--folder", str(tmp_path)], check=True, env=os.environ | {"PYTHONPATH": path})
    code = "".join(file.read_text() for file in tmp_path.glob("*-backward.py"))
    stored = re.findall(r"empty_strided_cuda\(\(64, 256, 5\d, 5\d\), \((\d+), (\d+),", code)
    assert stored and {step for _, step in stored} == {"1"}
