"""Models on the meta device are traced with the memory formats of real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.trace import trace


class Formats(nn.Module):
    """Convolutions, and tensors that are no buffers: one that is kept, one that is made in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)
        self.offset = torch.full((1, 4, 1, 1), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) + self.offset + torch.ones(1, 4, 1, 1, device=x.device)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "make", [Formats, pytest.param(lambda: timm.create_model("resnet18"), id="resnet18", marks=pytest.mark.full)]
)
def test_a_meta_model_has_the_memory_formats_of_a_real_one(
    make: Callable[[], nn.Module], memory_format: torch.memory_format
) -> None:
    found = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = make().to(memory_format=memory_format)
            x = torch.empty(2, 3, 32, 32).contiguous(memory_format=memory_format)
        found[device] = trace(model, (x,))
        assert {t.device.type for t in (*model.state_dict().values(), *found[device].constants.values())} == {device}
    real, meta = found["cpu"], found["meta"]
    assert (meta.ops, meta.weights, meta.inputs) == (real.ops, real.weights, real.inputs)
    images = [v for op in meta.ops for v in op.outputs if len(v.shape) == 4]
    last = memory_format == torch.channels_last
    assert images and {v.memory_order == (0, 2, 3, 1) for v in images if v.shape[2] > 1} == {last}
    kernels = [w for w in meta.weights if len(w.shape) == 4 and w.kind == "parameter"]
    assert kernels and {w.order == (0, 2, 3, 1) for w in kernels} == {last}
    assert {w.value.stride[1] == 1 for w in kernels if w.shape[2] > 1} == {last}


def test_a_meta_model_whose_shapes_are_not_known_yet() -> None:
    with torch.device("meta"):
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(TraceError, match="uninitialized parameter"):
        trace(lazy, (torch.empty(2, 3, device="meta"),))
