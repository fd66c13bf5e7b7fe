"""`autopar.prepare` on GPUs: a loop equals the same loop of the unmodified model on one GPU."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support import effort
from support.models import tiny_vit
from torch import nn

import autopar

pytestmark = pytest.mark.gpu
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MESHES: list[dict[str, Any]] = [{"devices": 1}, {"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 3}]
MESHES += effort.only([], [{"tp": 2}, {"dp": 2, "zero": 0}, {"dp": 2, "zero": 1}, {"pp": 2, "microbatches": 4}])


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Losses of three updates of two batches each, with a schedule and a loss of the caller's."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    losses = []
    for _ in range(3):
        first, second = module(x), module(x.flip(-1))  # two graphs at a time
        loss = nn.functional.cross_entropy(first, y, label_smoothing=0.1) + (first - second).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loop_equals_one_gpu(mesh: dict[str, Any], compiled: bool) -> None:
    devices = mesh.get("devices", 2)
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs CUDA devices: {devices}")
    torch.manual_seed(0)
    model, x, y = tiny_vit(), torch.randn(8, 3, 32, 32, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    alone = copy.deepcopy(model).cuda()
    expected = trained(alone, SGD(alone.parameters()), x, y)
    options = {"devices": 2, "example_inputs": x.cpu(), "cost": "analytic", "compile": compiled, **mesh}
    module, optimizer = autopar.prepare(model, SGD(model.parameters()), **options)
    try:
        losses = trained(module, optimizer, x, y)
        state = module.state_dict()
    finally:
        module.pm.close()
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(state[name], tensor.cpu(), rtol=1e-3, atol=1e-4, msg=name)
