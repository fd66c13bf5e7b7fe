"""Gradient hooks and ``no_grad`` inside autocast, which a trace would lose, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.traced import Body, X
from torch import nn

from autopar.errors import TraceError
from autopar.trace.hooks import check_hooks
from autopar.trace.trace import trace


def scaled_by_a_hook(self: Body, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)  # in forward
    return y


def test_a_hook_that_a_forward_registers_is_refused_not_dropped() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, code in enumerate(lines, 1) if code.endswith("  # in forward"))
    where = rf"register_hook at {__file__}:{line}, in scaled_by_a_hook: `y\.register_hook.*`\), which"
    with pytest.raises(TraceError, match=where):
        trace(Body(scaled_by_a_hook), (X,))
    assert [op.name for op in trace(Body(scaled_by_a_hook), (X,), mode="eval").ops] == ["lin.linear"]


def half_frozen(self: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
        with torch.no_grad():  # in autocast
            scale = y.abs().mean()
        return (y / scale).float()


def frozen_around(self: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scale = x.abs().mean()
    return self.lin(x) / scale


def test_no_grad_inside_of_an_autocast_region_is_refused_not_dropped() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, code in enumerate(lines, 1) if code.endswith("  # in autocast"))
    with pytest.raises(TraceError, match=rf"off inside of an autocast region at {__file__}:{line}, in half_frozen: "):
        trace(Body(half_frozen), (X,))
    assert trace(Body(half_frozen), (X,), mode="eval").ops
    assert trace(Body(frozen_around), (X,)).ops


class Hooked(nn.Module):
    """Linear layers in a block, and a buffer that has a gradient."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("shift", torch.ones(4, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.shift)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("name", "kind"), [("block.1.weight", "parameter"), ("shift", "buffer")])
def test_a_hook_on_a_weight_is_refused_until_it_is_removed(name: str, kind: str, method: str) -> None:
    model = Hooked()
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    handle = getattr(tensor, method)(lambda tensor: None)
    with pytest.raises(
        TraceError, match=rf"Hooked: its {kind} {name} has a hook on its gradient \({method}\).*optimizer="
    ):
        check_hooks(model)
    tensor.requires_grad_(False)  # a gradient that is never computed calls nothing
    check_hooks(model)
    tensor.requires_grad_()
    handle.remove()
    check_hooks(model)
