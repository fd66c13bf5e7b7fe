"""Feature maps split by height on two GPUs, eager and compiled, against one. Skips itself where there are fewer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import effort
from support.models import UNet, resnet18
from torch import nn

import autopar

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SGD = functools.partial(torch.optim.SGD, lr=1e-2)


def gradients(model: nn.Module, devices: int, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
    """Loss, gradients and the plan of one call, after a step that may be captured."""
    loss_fn = F.mse_loss if y.is_floating_point() else F.cross_entropy
    limits: dict[str, Any] = {"pp": 1, "dp": 1, "tp": devices} if devices > 1 else {}
    with autopar.parallelize(
        copy.deepcopy(model), devices, x, loss_fn=loss_fn, optimizer=SGD, microbatches=1, measure_seconds=0,
        **limits, **options,
    ) as pm:  # fmt: skip
        loss = pm.forward_backward(x, y).loss
        found = {name: tensor.float().cpu() for name, tensor in pm.gradients().items()}
        pm.optimizer_step()
        losses = [pm.train_step(x, y).loss for _ in range(3)]
        return loss, found, losses, str(pm.plan)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("channels_last", effort.only([None], [None, False]))
@pytest.mark.parametrize("make", [resnet18, UNet])
def test_height_over_two_gpus(
    make: Any, channels_last: bool | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = make()
    size = 1024 if make is resnet18 else 2048
    x = torch.randn(1 if make is UNet else 2, 3, size, size)
    y = torch.rand(1, 1, size, size) if make is UNet else torch.randint(0, 10, (2,))
    options = {"compile": compiled, "channels_last": channels_last}
    loss, expected, losses, _ = gradients(model, 1, x, y, **options)
    other_loss, found, other_losses, plan = gradients(model, 2, x, y, **options)
    assert "height / 2" in plan
    assert other_loss == pytest.approx(loss, rel=1e-4) and other_losses == pytest.approx(losses, rel=1e-2)
    for name, gradient in expected.items():
        worst = (gradient - found[name]).abs().max() / gradient.abs().max().clamp_min(1e-12)
        assert worst < 1e-2, (name, worst)
